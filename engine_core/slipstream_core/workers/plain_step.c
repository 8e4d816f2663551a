/* send_plain_step(link, write, step, rows, ids, logprobs, is_awaited, receipt): see plain_step.py,
 * where the same is in Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "link_numbers.h"
#include "msgpack.h"

#define STEP_TAG 43 /* as in tags.py */
#define STEP_FIELDS 8 /* with the tag */
#define LOGPROB_FIELDS 5
#define MOST_HEADERS 20

static PyTypeObject *numbers_type; /* see `prepare` */
enum { ROWS, IDS, VALUES, CANDIDATE_IDS, RANKS, WIDTHS, NUM_COLUMNS };
static PyObject *column_names[NUM_COLUMNS], *width_name; /* those of log-probabilities */

typedef struct {
    Py_buffer views[NUM_COLUMNS];
    bool has_logprobs;
    unsigned long long width, step;
    bool is_awaited;
} Plain;

static void release(Plain *plain)
{
    for (int at = 0; at < NUM_COLUMNS; at++)
        if (plain->views[at].obj != NULL)
            PyBuffer_Release(&plain->views[at]);
}

static int open_column(Plain *plain, int at, PyObject *given)
{
    if (given == NULL)
        return -1;
    Py_buffer *view = &plain->views[at];
    const int failed = PyObject_GetBuffer(given, view, PyBUF_SIMPLE);
    Py_DECREF(given);
    if (failed < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->len > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "send_plain_step: a column beyond 4 GiB");
        return -1;
    }
    return 0;
}

static int open_logprobs(Plain *plain, PyObject *logprobs)
{
    PyObject *width = PyObject_GetAttr(logprobs, width_name);
    if (width == NULL)
        return -1;
    plain->width = PyLong_AsUnsignedLongLong(width);
    Py_DECREF(width);
    if (PyErr_Occurred())
        return -1;
    plain->has_logprobs = true;
    for (int at = VALUES; at < NUM_COLUMNS; at++)
        if (open_column(plain, at, PyObject_GetAttr(logprobs, column_names[at])) < 0)
            return -1;
    return 0;
}

static uint8_t *write_view(uint8_t *at, const Py_buffer *view)
{
    at = write_column(at, (uint32_t)view->len);
    if (view->len)
        memcpy(at, view->buf, (size_t)view->len);
    return at + view->len;
}

/* The frame with the step, as msgspec encodes it. */
static uint8_t *write_step(const Plain *plain, const Numbers *link, uint64_t epoch, uint8_t *at)
{
    at = write_frame(at, epoch, (uint64_t)link->sent + 1, (uint64_t)link->received);
    at = write_array(at, STEP_FIELDS);
    at = write_number(at, STEP_TAG);
    at = write_number(at, plain->step);
    at = write_view(at, &plain->views[ROWS]);
    at = write_view(at, &plain->views[IDS]);
    at = write_column(at, 0); /* counts */
    at = write_column(at, 0); /* starts */
    if (plain->has_logprobs) {
        at = write_array(at, LOGPROB_FIELDS);
        at = write_number(at, plain->width);
        for (int column = VALUES; column < NUM_COLUMNS; column++)
            at = write_view(at, &plain->views[column]);
    } else
        at = write_nil(at);
    return write_bytes(at, plain->is_awaited ? 0xc3 : 0xc2, 0, 0);
}

static PyObject *frame_of(const Plain *plain, const Numbers *link)
{
    const uint64_t epoch = PyLong_AsUnsignedLongLong(link->epoch);
    if (PyErr_Occurred())
        return NULL;
    size_t most = MOST_HEADERS * HEADER_BYTES;
    for (int at = 0; at < NUM_COLUMNS; at++)
        most += (size_t)plain->views[at].len;
    uint8_t few[2048], *data = most <= sizeof few ? few : PyMem_Malloc(most);
    if (data == NULL)
        return PyErr_NoMemory();
    const uint8_t *end = write_step(plain, link, epoch, data);
    PyObject *message = PyBytes_FromStringAndSize((const char *)data, end - data);
    if (data != few)
        PyMem_Free(data);
    return message;
}

static PyObject *send_plain_step(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 8 || numbers_type == NULL || !PyObject_TypeCheck(args[0], numbers_type)) {
        PyErr_SetString(PyExc_TypeError, "send_plain_step: expected a link and 7 arguments");
        return NULL;
    }
    Numbers *link = (Numbers *)args[0];
    if (link->sent - link->acked >= link->window)
        Py_RETURN_FALSE;
    Plain plain = {0};
    PyObject *message = NULL, *taken = NULL;
    plain.step = PyLong_AsUnsignedLongLong(args[2]);
    const int is_awaited = PyObject_IsTrue(args[6]);
    if (PyErr_Occurred() || open_column(&plain, ROWS, Py_NewRef(args[3])) < 0 ||
        open_column(&plain, IDS, Py_NewRef(args[4])) < 0 ||
        (args[5] != Py_None && open_logprobs(&plain, args[5]) < 0))
        goto done;
    plain.is_awaited = is_awaited;
    message = frame_of(&plain, link);
    if (message != NULL)
        taken = PyObject_CallOneArg(args[1], message);
    if (taken != NULL) {
        const int is_taken = PyObject_IsTrue(taken);
        Py_DECREF(taken);
        taken = is_taken < 0 ? NULL : PyBool_FromLong(is_taken);
        if (is_taken > 0 && count_sent(link, args[7]) < 0)
            Py_CLEAR(taken);
    }
done:
    Py_XDECREF(message);
    release(&plain);
    return taken;
}

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
    {"send_plain_step", (PyCFunction)(void (*)(void))send_plain_step, METH_FASTCALL, NULL},
    {"prepare", prepare, METH_O, NULL},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "plain_step", 0, -1, functions, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_plain_step(void)
{
    static const char *const names[NUM_COLUMNS] = {0, 0, "values", "ids", "ranks", "widths"};
    for (int at = VALUES; at < NUM_COLUMNS; at++)
        if ((column_names[at] = PyUnicode_InternFromString(names[at])) == NULL)
            return NULL;
    if ((width_name = PyUnicode_InternFromString("width")) == NULL)
        return NULL;
    return PyModule_Create(&definition);
}
