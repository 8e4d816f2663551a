/* Sends steps in which the same rows get a token each; see plain_step.py.
 *
 * What a step could be left for is looked at before anything is sent, so one that is not sent has had
 * no effect.
 */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#include "link_numbers.h"
#include "msgpack.h"
#include "streak.h"

#define STEP_TAG 43 /* as in tags.py */
#define STEP_FIELDS 8 /* with the tag */
#define LOGPROB_FIELDS 5
#define MOST_HEADERS 20

/* The outcome of a step, as in plain_step.py. */
enum { NOT_SENT = 0, SENT = 1, AWAITED = 2, RECEIPTS = 4 };

static PyTypeObject *numbers_type, *counts_type;
enum { VALUES, CANDIDATE_IDS, RANKS, WIDTHS, NUM_COLUMNS };
static PyObject *column_names[NUM_COLUMNS]; /* those of log-probabilities */
static PyObject *width_name, *latest_name, *last_name;

typedef struct {
    PyObject_HEAD
    Numbers *link;
    StreakCounts *streak;
    PyObject *tokens, *rows, *packed, *write;
    PyObject *deferred;       /* list of the columns of log-probabilities; None without any */
    PyObject *last_logprobs;  /* those of the step before */
    Py_buffer marks;          /* by id: it may end a stream */
    bool by_any;              /* any id may end one */
    uint64_t epoch;
} PlainStepSender;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    PlainStepSender *self = (PlainStepSender *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->link);
    Py_VISIT(self->streak);
    Py_VISIT(self->tokens);
    Py_VISIT(self->rows);
    Py_VISIT(self->write);
    Py_VISIT(self->deferred);
    return 0;
}

static int clear(PyObject *object)
{
    PlainStepSender *self = (PlainStepSender *)object;
    Py_CLEAR(self->link);
    Py_CLEAR(self->streak);
    Py_CLEAR(self->tokens);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->packed);
    Py_CLEAR(self->write);
    Py_CLEAR(self->deferred);
    Py_CLEAR(self->last_logprobs);
    return 0;
}

static void dealloc(PyObject *object)
{
    PlainStepSender *self = (PlainStepSender *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    if (self->marks.obj != NULL)
        PyBuffer_Release(&self->marks);
    type->tp_free(object);
    Py_DECREF(type);
}

/* PlainStepSender(link, streak, tokens, rows, packed, write, by_any, marks, deferred) */
static PyObject *new_sender(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *link, *streak, *tokens, *rows, *packed, *write, *marks, *deferred;
    int by_any;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "PlainStepSender: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!OOSOpOO", numbers_type, &link, counts_type, &streak, &tokens,
                          &rows, &packed, &write, &by_any, &marks, &deferred))
        return NULL;
    if (deferred != Py_None && !PyList_CheckExact(deferred)) {
        PyErr_SetString(PyExc_TypeError, "PlainStepSender: a list of columns, or None");
        return NULL;
    }
    PlainStepSender *self = (PlainStepSender *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->link = (Numbers *)Py_NewRef(link), self->streak = (StreakCounts *)Py_NewRef(streak);
    self->tokens = Py_NewRef(tokens), self->rows = Py_NewRef(rows);
    self->packed = Py_NewRef(packed), self->write = Py_NewRef(write);
    self->deferred = Py_NewRef(deferred), self->by_any = by_any;
    if (deferred != Py_None && PyList_GET_SIZE(deferred))
        self->last_logprobs = Py_NewRef(PyList_GET_ITEM(deferred, PyList_GET_SIZE(deferred) - 1));
    self->epoch = PyLong_AsUnsignedLongLong(self->link->epoch);
    if (PyErr_Occurred() || PyObject_GetBuffer(marks, &self->marks, PyBUF_SIMPLE) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- a step ----------------------------------------------------------------------------- */

typedef struct {
    Py_buffer ids, columns[NUM_COLUMNS];
    PyObject *logprobs;
    unsigned long long width, step;
} Step;

static int open_column(Py_buffer *view, PyObject *given)
{
    if (given == NULL)
        return -1;
    const int failed = PyObject_GetBuffer(given, view, PyBUF_SIMPLE);
    Py_DECREF(given);
    if (failed < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->len > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "PlainStepSender: a column beyond 4 GiB");
        return -1;
    }
    return 0;
}

static void release(Step *step)
{
    for (int at = 0; at < NUM_COLUMNS; at++)
        if (step->columns[at].obj != NULL)
            PyBuffer_Release(&step->columns[at]);
    if (step->ids.obj != NULL)
        PyBuffer_Release(&step->ids);
    Py_CLEAR(step->logprobs);
}

/* The latest ids of the rows; as they were appended, if these rows were appended to last. */
static PyObject *ids_of(const PlainStepSender *self)
{
    PyObject *latest = PyObject_GetAttr(self->tokens, latest_name), *ids = NULL;
    if (latest == NULL)
        return NULL;
    if (PyTuple_CheckExact(latest) && PyTuple_GET_SIZE(latest) == 2 &&
        PyTuple_GET_ITEM(latest, 0) == self->rows)
        ids = Py_NewRef(PyTuple_GET_ITEM(latest, 1));
    Py_DECREF(latest);
    return ids != NULL ? ids : PyObject_CallMethodOneArg(self->tokens, last_name, self->rows);
}

static bool is_any_marked(const PlainStepSender *self, const Py_buffer *ids)
{
    const uint32_t *values = ids->buf;
    const uint8_t *marks = self->marks.buf;
    for (Py_ssize_t at = 0; at < ids->len / 4; at++)
        if (values[at] < self->marks.len && marks[values[at]])
            return true;
    return false;
}

/* The log-probabilities that came after those of the step before: 1; 0 where there are none; -1: error. */
static int open_logprobs(const PlainStepSender *self, Step *step)
{
    const Py_ssize_t num = PyList_GET_SIZE(self->deferred);
    PyObject *logprobs = num ? PyList_GET_ITEM(self->deferred, num - 1) : NULL;
    if (logprobs == NULL || logprobs == self->last_logprobs)
        return 0;
    PyObject *width = PyObject_GetAttr(logprobs, width_name);
    if (width == NULL)
        return -1;
    step->logprobs = Py_NewRef(logprobs);
    step->width = PyLong_AsUnsignedLongLong(width);
    Py_DECREF(width);
    if (PyErr_Occurred())
        return -1;
    for (int at = 0; at < NUM_COLUMNS; at++)
        if (open_column(&step->columns[at], PyObject_GetAttr(logprobs, column_names[at])) < 0)
            return -1;
    return 1;
}

static uint8_t *write_whole(uint8_t *at, const void *column, Py_ssize_t num_bytes)
{
    at = write_column(at, (uint32_t)num_bytes);
    if (num_bytes)
        memcpy(at, column, (size_t)num_bytes);
    return at + num_bytes;
}

/* The frame with the step, as msgspec encodes it. */
static uint8_t *write_step(const PlainStepSender *self, const Step *step, uint8_t *at)
{
    const Numbers *link = self->link;
    at = write_frame(at, self->epoch, (uint64_t)link->sent + 1, (uint64_t)link->received);
    at = write_array(at, STEP_FIELDS);
    at = write_number(at, STEP_TAG);
    at = write_number(at, step->step);
    at = write_whole(at, PyBytes_AS_STRING(self->packed), PyBytes_GET_SIZE(self->packed));
    at = write_whole(at, step->ids.buf, step->ids.len);
    at = write_column(at, 0); /* counts */
    at = write_column(at, 0); /* starts */
    if (step->logprobs == NULL)
        at = write_nil(at);
    else {
        at = write_array(at, LOGPROB_FIELDS);
        at = write_number(at, step->width);
        for (int column = 0; column < NUM_COLUMNS; column++)
            at = write_whole(at, step->columns[column].buf, step->columns[column].len);
    }
    return write_bytes(at, self->by_any ? 0xc3 : 0xc2, 0, 0);
}

static PyObject *frame_of(const PlainStepSender *self, const Step *step)
{
    size_t most = MOST_HEADERS * HEADER_BYTES + (size_t)PyBytes_GET_SIZE(self->packed) +
                  (size_t)step->ids.len;
    for (int at = 0; at < NUM_COLUMNS; at++)
        most += (size_t)step->columns[at].len;
    uint8_t few[2048], *data = most <= sizeof few ? few : PyMem_Malloc(most);
    if (data == NULL)
        return PyErr_NoMemory();
    const uint8_t *end = write_step(self, step, data);
    PyObject *message = PyBytes_FromStringAndSize((const char *)data, end - data);
    if (data != few)
        PyMem_Free(data);
    return message;
}

/* True if the connection takes the step; -1: error. */
static int write_frame_of(const PlainStepSender *self, const Step *step)
{
    PyObject *message = frame_of(self, step);
    if (message == NULL)
        return -1;
    PyObject *taken = PyObject_CallOneArg(self->write, message);
    Py_DECREF(message);
    if (taken == NULL)
        return -1;
    const int is_taken = PyObject_IsTrue(taken);
    Py_DECREF(taken);
    return is_taken;
}

/* Take in the receipts of this streak's acknowledged steps, up to the first other one; whether there
 * is such a one; -1: error.
 */
static int take_receipts(const PlainStepSender *self)
{
    const Numbers *link = self->link;
    const Py_ssize_t due = PyList_GET_SIZE(link->receipts) - (Py_ssize_t)(link->sent - link->acked);
    Py_ssize_t num = 0;
    while (num < due && PyList_GET_ITEM(link->receipts, num) == (PyObject *)self->streak)
        num++;
    if (num > 0) {
        if (PyList_SetSlice(link->receipts, 0, num, NULL) < 0)
            return -1;
        self->streak->num_acked += num;
        self->streak->is_acked_written = 0;
    }
    return num < due;
}

/* send(rows, step) -> what has become of it, see plain_step.py */
static PyObject *send(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    PlainStepSender *self = (PlainStepSender *)object;
    const Numbers *link = self->link;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "send: expected rows and a step");
        return NULL;
    }
    if (args[0] != self->rows || !self->streak->is_on || link->sent - link->acked >= link->window)
        return PyLong_FromLong(NOT_SENT);
    Step step = {0};
    step.step = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int is_sent = -1;
    if (open_column(&step.ids, ids_of(self)) < 0)
        goto done;
    if (step.ids.len != PyBytes_GET_SIZE(self->packed)) {
        PyErr_SetString(PyExc_ValueError, "send: an id for each row expected");
        goto done;
    }
    is_sent = self->by_any || !is_any_marked(self, &step.ids);
    if (is_sent > 0 && self->deferred != Py_None)
        is_sent = open_logprobs(self, &step);
    if (is_sent > 0)
        is_sent = write_frame_of(self, &step);
    if (is_sent > 0 && count_sent(self->link, (PyObject *)self->streak) < 0)
        is_sent = -1;
    if (is_sent > 0) {
        self->streak->num_sent++;
        self->streak->is_written = 0;
        if (step.logprobs != NULL)
            Py_XSETREF(self->last_logprobs, Py_NewRef(step.logprobs));
    }
done:
    release(&step);
    if (is_sent <= 0)
        return is_sent < 0 ? NULL : PyLong_FromLong(NOT_SENT);
    const int has_others = take_receipts(self);
    if (has_others < 0)
        return NULL;
    return PyLong_FromLong(SENT | (self->by_any ? AWAITED : 0) | (has_others ? RECEIPTS : 0));
}

/* ---- the module ------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, "Send the next step."},
    {0},
};

static PyMemberDef members[] = {
    {"streak", T_OBJECT_EX, offsetof(PlainStepSender, streak), READONLY, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_sender},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {"slipstream_core._native.PlainStepSender", sizeof(PlainStepSender), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

int add_plain_step(PyObject *module)
{
    static const char *const names[NUM_COLUMNS] = {"values", "ids", "ranks", "widths"};
    for (int at = 0; at < NUM_COLUMNS; at++)
        if ((column_names[at] = PyUnicode_InternFromString(names[at])) == NULL)
            return -1;
    width_name = PyUnicode_InternFromString("width");
    latest_name = PyUnicode_InternFromString("latest");
    last_name = PyUnicode_InternFromString("last");
    if (width_name == NULL || latest_name == NULL || last_name == NULL)
        return -1;
    if ((numbers_type = type_of("slipstream_ipc._native", "LinkNumbers")) == NULL ||
        (counts_type = type_of("slipstream_ipc._native", "StreakCounts")) == NULL)
        return -1;
    return add_type(module, &spec) == NULL ? -1 : 0;
}
