/* Reads reports without ends: `report_reader.py` is the reference. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#include "link_numbers.h"
#include "msgpack.h"

#define REPORT_TAG 31 /* as in tags.py */
#define REPORT_FIELDS 4 /* with the tag */

static PyTypeObject *numbers_type; /* see `prepare` */

typedef struct {
    PyObject_HEAD
    Numbers *link;
    uint64_t epoch;
    long long step;
} ReportReader;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((ReportReader *)object)->link);
    return 0;
}

static int clear(PyObject *object)
{
    Py_CLEAR(((ReportReader *)object)->link);
    return 0;
}

static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ReportReader(link, step) */
static PyObject *new_reader(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *link;
    long long step;
    if (numbers_type == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "ReportReader: `prepare` comes first");
        return NULL;
    }
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "ReportReader: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!L", numbers_type, &link, &step))
        return NULL;
    ReportReader *self = (ReportReader *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->link = (Numbers *)Py_NewRef(link), self->step = step;
    self->epoch = PyLong_AsUnsignedLongLong(self->link->epoch);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* take(message, now) -> whether it was an acknowledgement alone, or the link's next report without
 * ends; no effect where it was not
 */
static PyObject *take(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    ReportReader *self = (ReportReader *)object;
    Numbers *link = self->link;
    if (num_args != 2 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "take: expected bytes and a number");
        return NULL;
    }
    const double now = PyFloat_AsDouble(args[1]);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    Reader reader = {data, data + PyBytes_GET_SIZE(args[0]), false};
    uint64_t step = 0;
    size_t num_rows = 0, num_tokens = 0;
    expect(&reader, 0x94);
    const uint64_t epoch = read_number(&reader), seq = read_number(&reader);
    const uint64_t ack = read_number(&reader);
    const bool is_ack = reader.at < reader.end && *reader.at == 0xc0;
    if (is_ack)
        expect(&reader, 0xc0);
    else {
        expect(&reader, 0x90 | REPORT_FIELDS);
        expect(&reader, REPORT_TAG);
        step = read_number(&reader);
        read_column(&reader, &num_rows);
        read_column(&reader, &num_tokens);
    }
    const uint64_t received = (uint64_t)link->received;
    if (reader.has_failed || reader.at != reader.end || epoch != self->epoch ||
        ack > (uint64_t)link->sent || (is_ack ? seq > received : seq != received + 1) ||
        step > INT64_MAX || num_rows || num_tokens)
        Py_RETURN_FALSE;
    heard(link, (long long)ack, now);
    if (!is_ack) {
        link->received = (long long)seq;
        if ((long long)step > self->step)
            self->step = (long long)step;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, "Read a report without ends."},
    {0},
};

static PyMemberDef members[] = {
    {"step", T_LONGLONG, offsetof(ReportReader, step), 0, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_reader},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {"report_reader.ReportReader", sizeof(ReportReader), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

/* prepare(LinkNumbers): the type of what it counts by */
static PyObject *prepare(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "prepare: expected a type");
        return NULL;
    }
    Py_XSETREF(numbers_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_O, NULL},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "report_reader", 0, -1, functions, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_report_reader(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(module, "ReportReader", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
