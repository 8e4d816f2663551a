/* Reads reports without ends: see `_native.pyi`. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#include "link_numbers.h"
#include "msgpack.h"

#define REPORT_TAG 31 /* as in tags.py */
#define REPORT_FIELDS 4 /* with the tag */

static PyTypeObject *numbers_type;

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

static PyType_Spec spec = {"slipstream_core._native.ReportReader", sizeof(ReportReader), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

int add_report_reader(PyObject *module)
{
    numbers_type = type_of("slipstream_ipc._native", "LinkNumbers");
    if (numbers_type == NULL)
        return -1;
    return add_type(module, &spec) == NULL ? -1 : 0;
}
