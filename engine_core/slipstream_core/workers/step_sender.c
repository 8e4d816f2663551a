/* Sends what a step gave its rows; see step_sender.py.
 *
 * What a step could be left for is looked at before anything is sent, so one that is not sent has had
 * no effect.
 */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#include "relay.h"

#define MOST_HEADERS 20

/* The outcome of a step, as in step_sender.py. */
enum { NOT_SENT = 0, SENT = 1, AWAITED = 2, RECEIPTS = 4 };

static PyTypeObject *numbers_type, *receipt_type;
enum { VALUES, CANDIDATE_IDS, RANKS, WIDTHS, NUM_COLUMNS };
static PyObject *column_names[NUM_COLUMNS]; /* those of log-probabilities */
static PyObject *width_name, *latest_name, *array_name, *life_name, *sent_name;

/* ---- what is to be acknowledged ----------------------------------------------------------- */

/* The rows of a message, and where its tokens end. */
typedef struct {
    PyObject_VAR_HEAD
    long long life;    /* of the cursors, when it was sent */
    uint32_t values[]; /* the rows, then the ends */
} SentRows;

static void free_receipt(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *half_of(const SentRows *self, int half)
{
    const Py_ssize_t num = Py_SIZE(self) / 2;
    return PyBytes_FromStringAndSize((const char *)(self->values + half * num), 4 * num);
}

static PyObject *receipt_rows(PyObject *object, void *unused)
{
    (void)unused;
    return half_of((SentRows *)object, 0);
}

static PyObject *receipt_ends(PyObject *object, void *unused)
{
    (void)unused;
    return half_of((SentRows *)object, 1);
}

static PyGetSetDef receipt_columns[] = {
    {"rows", receipt_rows, NULL, NULL, NULL},
    {"ends", receipt_ends, NULL, NULL, NULL},
    {0},
};

static PyMemberDef receipt_members[] = {
    {"life", T_LONGLONG, offsetof(SentRows, life), READONLY, NULL},
    {0},
};

static PyType_Slot receipt_slots[] = {
    {Py_tp_dealloc, free_receipt},
    {Py_tp_getset, receipt_columns},
    {Py_tp_members, receipt_members},
    {0, NULL},
};

static PyType_Spec receipt_spec = {"slipstream_core._native.SentRows", offsetof(SentRows, values),
                                   sizeof(uint32_t),
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   receipt_slots};

/* ---- the sender --------------------------------------------------------------------------- */

enum { SENT_TO, ACKED, OPEN, OPENED_AT, BY_ANY, MARKS, NUM_VIEWS };

typedef struct {
    PyObject_HEAD
    Numbers *link;
    PyObject *cursors, *sent, *tokens, *write; /* sent: the column that the cursors have */
    PyObject *last_logprobs;                   /* those of the step before */
    int num_views;
    Py_buffer views[NUM_VIEWS]; /* by row, and by id: it may end a stream */
    Py_ssize_t num_rows, budget; /* budget: tokens of a message */
    uint64_t epoch;
} StepSender;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    StepSender *self = (StepSender *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->link);
    Py_VISIT(self->cursors);
    Py_VISIT(self->tokens);
    Py_VISIT(self->write);
    return 0;
}

static int clear(PyObject *object)
{
    StepSender *self = (StepSender *)object;
    Py_CLEAR(self->link);
    Py_CLEAR(self->cursors);
    Py_CLEAR(self->sent);
    Py_CLEAR(self->tokens);
    Py_CLEAR(self->write);
    Py_CLEAR(self->last_logprobs);
    return 0;
}

static void dealloc(PyObject *object)
{
    StepSender *self = (StepSender *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    while (self->num_views > 0)
        PyBuffer_Release(&self->views[--self->num_views]);
    type->tp_free(object);
    Py_DECREF(type);
}

/* StepSender(link, cursors, (sent, acked, open, opened_at), tokens, write, (by_any, marks), budget) */
static PyObject *new_sender(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *link, *cursors, *tokens, *write, *columns[NUM_VIEWS];
    Py_ssize_t budget;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "StepSender: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O(OOOO)OO(OO)n", numbers_type, &link, &cursors,
                          &columns[SENT_TO], &columns[ACKED], &columns[OPEN], &columns[OPENED_AT],
                          &tokens, &write, &columns[BY_ANY], &columns[MARKS], &budget))
        return NULL;
    StepSender *self = (StepSender *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->link = (Numbers *)Py_NewRef(link), self->cursors = Py_NewRef(cursors);
    self->sent = Py_NewRef(columns[SENT_TO]), self->tokens = Py_NewRef(tokens);
    self->write = Py_NewRef(write), self->budget = budget;
    self->epoch = PyLong_AsUnsignedLongLong(self->link->epoch);
    if (PyErr_Occurred())
        goto failed;
    for (; self->num_views < NUM_VIEWS; self->num_views++)
        if (PyObject_GetBuffer(columns[self->num_views], &self->views[self->num_views],
                               self->num_views <= ACKED ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto failed;
    self->num_rows = self->views[OPEN].len;
    for (int at = SENT_TO; at <= OPENED_AT; at++)
        if (self->views[at].len != self->num_rows * (at == OPEN ? 1 : 8)) {
            PyErr_SetString(PyExc_ValueError, "StepSender: columns of different lengths");
            goto failed;
        }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* ---- a step ----------------------------------------------------------------------------- */

typedef struct {
    Py_buffer rows, ids, counts, columns[NUM_COLUMNS];
    PyObject *logprobs;
    SentRows *receipt;
    unsigned long long width, step;
    Py_ssize_t num;
    bool is_even, is_awaited; /* is_even: a token of each row */
} Step;

static int open_column(Py_buffer *view, PyObject *given)
{
    if (PyObject_GetBuffer(given, view, PyBUF_SIMPLE) < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->len > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "StepSender: a column beyond 4 GiB");
        return -1;
    }
    return 0;
}

static void release(Step *step)
{
    Py_buffer *const views[] = {&step->rows, &step->ids, &step->counts};
    for (int at = 0; at < 3; at++)
        if (views[at]->obj != NULL)
            PyBuffer_Release(views[at]);
    for (int at = 0; at < NUM_COLUMNS; at++)
        if (step->columns[at].obj != NULL)
            PyBuffer_Release(&step->columns[at]);
    Py_CLEAR(step->logprobs);
    Py_CLEAR(step->receipt);
}

/* The rows, ids and counts that were appended last, if to these rows: 1; 0 if not; -1: error. */
static int open_latest(const StepSender *self, PyObject *rows, Step *step)
{
    PyObject *latest = PyObject_GetAttr(self->tokens, latest_name), *array = NULL;
    int found = latest == NULL ? -1 : 0;
    if (latest != NULL && PyTuple_CheckExact(latest) && PyTuple_GET_SIZE(latest) == 3 &&
        PyTuple_GET_ITEM(latest, 0) == rows) {
        PyObject *counts = PyTuple_GET_ITEM(latest, 2);
        array = PyObject_GetAttr(rows, array_name);
        const bool is_open =
            array != NULL && open_column(&step->rows, array) == 0 &&
            open_column(&step->ids, PyTuple_GET_ITEM(latest, 1)) == 0 &&
            (counts == Py_None || open_column(&step->counts, counts) == 0);
        found = is_open ? 1 : -1;
    }
    Py_XDECREF(array);
    Py_XDECREF(latest);
    return found;
}

static int64_t count_of(const Step *step, Py_ssize_t at)
{
    return step->counts.obj == NULL ? 1 : ((const int64_t *)step->counts.buf)[at];
}

static bool is_any_marked(const StepSender *self, const Py_buffer *ids)
{
    const uint32_t *values = ids->buf;
    const uint8_t *marks = self->views[MARKS].buf;
    for (Py_ssize_t at = 0; at < ids->len / 4; at++)
        if (values[at] < self->views[MARKS].len && marks[values[at]])
            return true;
    return false;
}

/* Look at the rows: 1 if all are open and their tokens fit a message, with `receipt` filled; -1:
 * error.
 */
static int look_at_rows(const StepSender *self, Step *step)
{
    const int64_t *rows = step->rows.buf, *sent = self->views[SENT_TO].buf;
    const uint8_t *open = self->views[OPEN].buf, *by_any = self->views[BY_ANY].buf;
    const Py_ssize_t num = step->num = step->rows.len / 8;
    if (!num || step->ids.len / 4 > self->budget)
        return 0;
    if (step->counts.obj != NULL && step->counts.len != step->rows.len)
        goto wrong;
    step->receipt = PyObject_NewVar(SentRows, receipt_type, 2 * num);
    if (step->receipt == NULL)
        return -1;
    uint32_t *values = step->receipt->values;
    const int64_t num_rows = self->num_rows < UINT32_MAX ? self->num_rows : UINT32_MAX;
    const int64_t num_marked = self->views[BY_ANY].len;
    Py_ssize_t num_tokens = 0;
    bool is_awaited = false;
    for (Py_ssize_t at = 0; at < num; at++) {
        const int64_t row = rows[at], count = count_of(step, at);
        if (row < 0 || row >= num_rows || !open[row] || count < 1 || count > UINT32_MAX ||
            sent[row] + count > UINT32_MAX)
            return 0;
        is_awaited |= row < num_marked && by_any[row];
        values[at] = (uint32_t)row, values[num + at] = (uint32_t)(sent[row] + count);
        num_tokens += (Py_ssize_t)count;
    }
    step->is_awaited = is_awaited;
    if (step->ids.len != 4 * num_tokens)
        goto wrong;
    step->is_even = num_tokens == num;
    return step->is_awaited || !is_any_marked(self, &step->ids);
wrong:
    PyErr_SetString(PyExc_ValueError, "send: ids and counts that do not fit the rows");
    return -1;
}

/* The log-probabilities that came after those of the step before: 1; 0 where there are none; -1: error. */
static int open_logprobs(const StepSender *self, PyObject *deferred, Step *step)
{
    const Py_ssize_t num = PyList_GET_SIZE(deferred);
    PyObject *logprobs = num ? PyList_GET_ITEM(deferred, num - 1) : NULL;
    if (logprobs == NULL || logprobs == self->last_logprobs || !step->is_even)
        return 0;
    PyObject *width = PyObject_GetAttr(logprobs, width_name);
    if (width == NULL)
        return -1;
    step->logprobs = Py_NewRef(logprobs);
    step->width = PyLong_AsUnsignedLongLong(width);
    Py_DECREF(width);
    if (PyErr_Occurred())
        return -1;
    for (int at = 0; at < NUM_COLUMNS; at++) {
        PyObject *column = PyObject_GetAttr(logprobs, column_names[at]);
        const int failed = column == NULL || open_column(&step->columns[at], column) < 0;
        Py_XDECREF(column);
        if (failed)
            return -1;
    }
    return 1;
}

/* The counts, or where the tokens begin. */
static uint8_t *write_spans(const Step *step, uint8_t *to, bool are_starts)
{
    const uint32_t *ends = step->receipt->values + step->num;
    to = write_column(to, 4 * (uint32_t)step->num);
    for (Py_ssize_t at = 0; at < step->num; at++, to += 4) {
        const uint32_t count = (uint32_t)count_of(step, at);
        const uint32_t value = are_starts ? ends[at] - count : count;
        memcpy(to, &value, 4);
    }
    return to;
}

/* The frame with the step, as msgspec encodes it. */
static uint8_t *write_step(const StepSender *self, const Step *step, uint8_t *to)
{
    const Numbers *link = self->link;
    to = write_frame(to, self->epoch, (uint64_t)link->sent + 1, (uint64_t)link->received);
    to = write_array(to, STEP_FIELDS);
    to = write_number(to, STEP_TAG);
    to = write_number(to, step->step);
    to = write_whole(to, step->receipt->values, 4 * (size_t)step->num);
    to = write_whole(to, step->ids.buf, (size_t)step->ids.len);
    to = step->is_even ? write_column(to, 0) : write_spans(step, to, false);
    to = step->is_even ? write_column(to, 0) : write_spans(step, to, true);
    if (step->logprobs == NULL)
        to = write_nil(to);
    else {
        to = write_array(to, LOGPROB_FIELDS);
        to = write_number(to, step->width);
        for (int at = 0; at < NUM_COLUMNS; at++)
            to = write_whole(to, step->columns[at].buf, (size_t)step->columns[at].len);
    }
    return write_bytes(to, step->is_awaited ? 0xc3 : 0xc2, 0, 0);
}

/* True if the connection takes the step; -1: error. */
static int write_frame_of(const StepSender *self, const Step *step)
{
    size_t most = MOST_HEADERS * HEADER_BYTES + (step->is_even ? 4 : 12) * (size_t)step->num +
                  (size_t)step->ids.len;
    for (int at = 0; at < NUM_COLUMNS; at++)
        most += (size_t)step->columns[at].len;
    uint8_t few[2048], *data = most <= sizeof few ? few : PyMem_Malloc(most);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int is_taken = hand_over(self->write, data, write_step(self, step, data));
    if (data != few)
        PyMem_Free(data);
    return is_taken;
}

/* The step has left: move the cursors; -1: error. */
static int note_sent(StepSender *self, const Step *step)
{
    PyObject *life = PyObject_GetAttr(self->cursors, life_name);
    step->receipt->life = life == NULL ? -1 : PyLong_AsLongLong(life);
    Py_XDECREF(life);
    if (PyErr_Occurred() || count_sent(self->link, (PyObject *)step->receipt) < 0)
        return -1;
    int64_t *sent = self->views[SENT_TO].buf;
    const uint32_t *rows = step->receipt->values, *ends = rows + step->num;
    for (Py_ssize_t at = 0; at < step->num; at++)
        sent[rows[at]] = ends[at];
    if (step->logprobs != NULL)
        Py_XSETREF(self->last_logprobs, Py_NewRef(step->logprobs));
    return 0;
}

/* As Cursors.acknowledge does. */
static void acknowledge(const StepSender *self, const SentRows *receipt)
{
    const Py_ssize_t num = Py_SIZE(receipt) / 2;
    const uint32_t *rows = receipt->values, *ends = rows + num;
    const int64_t *opened_at = self->views[OPENED_AT].buf;
    int64_t *acked = self->views[ACKED].buf;
    for (Py_ssize_t at = 0; at < num; at++) {
        const int64_t row = rows[at];
        if (row < self->num_rows && opened_at[row] <= receipt->life && acked[row] < ends[at])
            acked[row] = ends[at];
    }
}

/* Take in the receipts of acknowledged steps, up to the first other one; whether there is such a one;
 * -1: error.
 */
static int take_receipts(const StepSender *self)
{
    const Numbers *link = self->link;
    const Py_ssize_t due = PyList_GET_SIZE(link->receipts) - (Py_ssize_t)(link->sent - link->acked);
    Py_ssize_t num = 0;
    for (; num < due && Py_TYPE(PyList_GET_ITEM(link->receipts, num)) == receipt_type; num++)
        acknowledge(self, (SentRows *)PyList_GET_ITEM(link->receipts, num));
    if (num > 0 && PyList_SetSlice(link->receipts, 0, num, NULL) < 0)
        return -1;
    return num < due;
}

/* True if these are the columns of the cursors; -1: error. */
static int is_current(const StepSender *self)
{
    PyObject *sent = PyObject_GetAttr(self->cursors, sent_name);
    Py_XDECREF(sent);
    return sent == NULL ? -1 : sent == self->sent;
}

/* send(rows, step, deferred) -> what has become of it, see step_sender.py */
static PyObject *send(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    StepSender *self = (StepSender *)object;
    const Numbers *link = self->link;
    if (num_args != 3 || (args[2] != Py_None && !PyList_CheckExact(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "send: expected rows, a step, and a list or None");
        return NULL;
    }
    Step step = {0};
    step.step = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int is_sent = link->sent - link->acked < link->window ? is_current(self) : 0;
    if (is_sent > 0)
        is_sent = open_latest(self, args[0], &step);
    if (is_sent > 0)
        is_sent = look_at_rows(self, &step);
    if (is_sent > 0 && args[2] != Py_None)
        is_sent = open_logprobs(self, args[2], &step);
    if (is_sent > 0)
        is_sent = write_frame_of(self, &step);
    if (is_sent > 0 && note_sent(self, &step) < 0)
        is_sent = -1;
    release(&step);
    if (is_sent <= 0)
        return is_sent < 0 ? NULL : PyLong_FromLong(NOT_SENT);
    const int has_others = take_receipts(self);
    if (has_others < 0)
        return NULL;
    return PyLong_FromLong(SENT | (step.is_awaited ? AWAITED : 0) | (has_others ? RECEIPTS : 0));
}

/* ---- the module ------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, "Send the next step."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_sender},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"slipstream_core._native.StepSender", sizeof(StepSender), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

int add_step_sender(PyObject *module)
{
    static const char *const names[NUM_COLUMNS] = {"values", "ids", "ranks", "widths"};
    for (int at = 0; at < NUM_COLUMNS; at++)
        if ((column_names[at] = PyUnicode_InternFromString(names[at])) == NULL)
            return -1;
    width_name = PyUnicode_InternFromString("width");
    latest_name = PyUnicode_InternFromString("latest");
    array_name = PyUnicode_InternFromString("array");
    life_name = PyUnicode_InternFromString("life");
    sent_name = PyUnicode_InternFromString("_sent");
    if (!width_name || !latest_name || !array_name || !life_name || !sent_name)
        return -1;
    if ((numbers_type = type_of("slipstream_ipc._native", "LinkNumbers")) == NULL ||
        (receipt_type = add_type(module, &receipt_spec)) == NULL)
        return -1;
    return add_type(module, &spec) == NULL ? -1 : 0;
}
