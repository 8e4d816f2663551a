/* Relays steps in which the same streams get a plain token each; see step_relay.py.
 *
 * Everything that a step could be refused for is looked at before anything is written, so a step that
 * is not taken has had no effect. The rows were checked against the columns when the relay was made:
 * those of `loops` and `pages` do not change their size while these objects live.
 */
#include "module.h"

#include <structmember.h>
#include <time.h>

#include "link_numbers.h"
#include "msgpack.h"
#include "row_loops.h"
#include "token_pages.h"

#define STEP_TAG 43 /* as in tags.py */
#define DELTAS_TAG 22
#define REPORT_TAG 31
#define STEP_FIELDS 8 /* with the tag */
#define DELTAS_FIELDS 13
#define REPORT_FIELDS 4
#define LOGPROB_FIELDS 5
#define MAX_WIDTH (1 << 16)

/* The outcome of a step, as in step_relay.py. */
enum { NOT_TAKEN = 0, TAKEN = 1, UNREPORTED = 2, UNSENT = 4 };

enum { ROWS, ORDER, OTHERS, BOUNDS, BUCKETS, TOTAL, COUNTERS, NUM_ADDED, BEGINS, ENDS, NUM_VIEWS };
enum { NUM_MESSAGES, NUM_DELTAS, NUM_DELIVERED, NUM_COUNTERS };

static PyTypeObject *numbers_type, *loops_type, *pages_type;
static PyObject *columns_type;
static PyObject *num_free_name;

typedef struct {
    PyObject_HEAD
    Numbers *core, *client;
    RowLoops *loops;
    TokenPages *pages;
    PyObject *table, *core_rows, *report, *deliver, *receipt, *connection;
    PyObject *deferred; /* list of the columns of log-probabilities; None without any */
    int num_views;
    Py_buffer views[NUM_VIEWS];
    Py_ssize_t num;
    uint64_t core_epoch, client_epoch;
    long long max_unacked, may_owe, max_deferred, width, step;
    uint32_t *ids;    /* of a step, in its order */
    PyObject **texts; /* of a message, in its order */
} StepRelay;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    StepRelay *self = (StepRelay *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->core);
    Py_VISIT(self->client);
    Py_VISIT(self->table);
    Py_VISIT(self->report);
    Py_VISIT(self->deliver);
    Py_VISIT(self->receipt);
    Py_VISIT(self->connection);
    Py_VISIT(self->deferred);
    return 0;
}

static int clear(PyObject *object)
{
    StepRelay *self = (StepRelay *)object;
    Py_CLEAR(self->core);
    Py_CLEAR(self->client);
    Py_CLEAR(self->loops);
    Py_CLEAR(self->pages);
    Py_CLEAR(self->table);
    Py_CLEAR(self->core_rows);
    Py_CLEAR(self->report);
    Py_CLEAR(self->deliver);
    Py_CLEAR(self->receipt);
    Py_CLEAR(self->connection);
    Py_CLEAR(self->deferred);
    return 0;
}

static void dealloc(PyObject *object)
{
    StepRelay *self = (StepRelay *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    while (self->num_views > 0)
        PyBuffer_Release(&self->views[--self->num_views]);
    PyMem_Free(self->ids);
    PyMem_Free(self->texts);
    type->tp_free(object);
    Py_DECREF(type);
}

static int take_view(StepRelay *self, int at, PyObject *given, Py_ssize_t num, int flags)
{
    Py_buffer *view = &self->views[at];
    if (PyObject_GetBuffer(given, view, flags) < 0)
        return -1;
    self->num_views++;
    if (view->len % 8 || (num >= 0 && view->len != 8 * num)) {
        PyErr_Format(PyExc_ValueError, "column %d: %zd bytes, expected %zd values", at, view->len,
                     num);
        return -1;
    }
    return 0;
}

/* The rows, all different, are among those of `loops`; the order has each index once. */
static int check_rows(const StepRelay *self)
{
    const int64_t *rows = self->views[ROWS].buf, *order = self->views[ORDER].buf;
    const int64_t *others = self->views[OTHERS].buf;
    bool *is_seen = PyMem_Calloc(self->loops->num_rows + 1, sizeof *is_seen), is_right = true;
    if (is_seen == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t k = 0; k < self->num && is_right; k++)
        is_right = rows[k] >= 0 && rows[k] < self->loops->num_rows;
    for (Py_ssize_t k = 0; k < self->num && is_right; k++) {
        is_right = order[k] >= 0 && order[k] < self->num && !is_seen[rows[order[k]]];
        if (is_right)
            is_seen[rows[order[k]]] = true;
    }
    PyMem_Free(is_seen);
    if (!is_right) {
        PyErr_SetString(PyExc_IndexError, "StepRelay: rows that are none, or come twice");
        return -1;
    }
    for (Py_ssize_t k = 0; k < self->views[OTHERS].len / 8; k++)
        if (others[k] < 0 || others[k] >= self->loops->num_rows) {
            PyErr_SetString(PyExc_IndexError, "StepRelay: other rows that are none");
            return -1;
        }
    return 0;
}

/* StepRelay(core, client, loops, pages, table, core_rows, (rows, order, others), report, deliver,
 *           receipt, (bounds, buckets, total, counters), (num_added, begins, ends), max_unacked, may_owe, connection,
 *           (width, deferred, max_deferred)) */
static PyObject *new_relay(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *core, *client, *loops, *pages, *table, *core_rows, *report, *deliver, *receipt;
    PyObject *connection;
    PyObject *columns[NUM_VIEWS];
    PyObject *deferred;
    long long max_unacked, may_owe, width, max_deferred;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "StepRelay: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!O!O!OS(OOO)OOO!(OOOO)(OOO)LLO(LOL)", numbers_type, &core, numbers_type,
                          &client, loops_type, &loops, pages_type, &pages, &table, &core_rows,
                          &columns[ROWS], &columns[ORDER], &columns[OTHERS], &report, &deliver,
                          &PyList_Type, &receipt, &columns[BOUNDS], &columns[BUCKETS],
                          &columns[TOTAL], &columns[COUNTERS], &columns[NUM_ADDED],
                          &columns[BEGINS], &columns[ENDS], &max_unacked, &may_owe, &connection,
                          &width, &deferred, &max_deferred))
        return NULL;
    if (width < 0 || width > MAX_WIDTH || (width && !PyList_CheckExact(deferred))) {
        PyErr_SetString(PyExc_ValueError, "StepRelay: a width, and a list for its columns");
        return NULL;
    }
    StepRelay *self = (StepRelay *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Numbers *)Py_NewRef(core), self->client = (Numbers *)Py_NewRef(client);
    self->loops = (RowLoops *)Py_NewRef(loops), self->pages = (TokenPages *)Py_NewRef(pages);
    self->table = Py_NewRef(table), self->core_rows = Py_NewRef(core_rows);
    self->report = Py_NewRef(report), self->deliver = Py_NewRef(deliver);
    self->receipt = Py_NewRef(receipt), self->connection = Py_NewRef(connection);
    self->max_unacked = max_unacked, self->may_owe = may_owe;
    self->width = width, self->max_deferred = max_deferred, self->deferred = Py_NewRef(deferred);
    self->num = PyBytes_GET_SIZE(core_rows) / 4;
    self->core_epoch = PyLong_AsUnsignedLongLong(self->core->epoch);
    self->client_epoch = PyLong_AsUnsignedLongLong(self->client->epoch);
    if (PyErr_Occurred())
        goto failed;
    const int written = PyBUF_WRITABLE;
    if (take_view(self, ROWS, columns[ROWS], self->num, PyBUF_SIMPLE) < 0 ||
        take_view(self, ORDER, columns[ORDER], self->num, PyBUF_SIMPLE) < 0 ||
        take_view(self, OTHERS, columns[OTHERS], -1, PyBUF_SIMPLE) < 0 ||
        take_view(self, BOUNDS, columns[BOUNDS], -1, PyBUF_SIMPLE) < 0 ||
        take_view(self, BUCKETS, columns[BUCKETS], self->views[BOUNDS].len / 8 + 1, written) < 0 ||
        take_view(self, TOTAL, columns[TOTAL], 1, written) < 0 ||
        take_view(self, COUNTERS, columns[COUNTERS], NUM_COUNTERS, written) < 0 ||
        take_view(self, NUM_ADDED, columns[NUM_ADDED], 1, written) < 0 ||
        take_view(self, BEGINS, columns[BEGINS], -1, written) < 0 ||
        take_view(self, ENDS, columns[ENDS], self->views[BEGINS].len / 8, written) < 0 ||
        check_rows(self) < 0)
        goto failed;
    if (self->views[BEGINS].len == 0) {
        PyErr_SetString(PyExc_ValueError, "StepRelay: no room for spans");
        goto failed;
    }
    self->ids = PyMem_Calloc(self->num + 1, sizeof *self->ids);
    self->texts = PyMem_Calloc(self->num + 1, sizeof *self->texts);
    if (self->ids == NULL || self->texts == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* ---- a step ----------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *at;
    size_t num_bytes;
} Span;

typedef struct {
    uint64_t seq, ack, step;
    bool is_awaited;
    Span logprobs, columns[3]; /* as they are encoded; their values, ids and ranks */
} Step;

/* Columns with `width` candidates of each token, or none. */
static void read_logprobs(const StepRelay *self, Reader *reader, Step *step)
{
    step->logprobs.at = reader->at;
    if (!self->width)
        expect(reader, 0xc0);
    else {
        expect(reader, 0x90 | LOGPROB_FIELDS);
        if (read_number(reader) != (uint64_t)self->width)
            reader->has_failed = true;
        for (int at = 0; at < 3; at++) {
            Span *column = &step->columns[at];
            column->at = read_column(reader, &column->num_bytes);
            if (column->num_bytes != 4 * (size_t)self->num * (at < 2 ? (size_t)self->width : 1))
                reader->has_failed = true;
        }
        size_t num_widths;
        read_column(reader, &num_widths);
        if (num_widths)
            reader->has_failed = true;
    }
    step->logprobs.num_bytes = (size_t)(reader->at - step->logprobs.at);
}

/* True if the message is the link's next step, with a token for each row; fills `ids`. */
static bool read_step(const StepRelay *self, PyObject *message, Step *step)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message);
    Reader reader = {data, data + PyBytes_GET_SIZE(message), false};
    size_t num_rows, num_ids, num_counts, num_starts;
    expect(&reader, 0x94);
    uint64_t epoch = read_number(&reader);
    step->seq = read_number(&reader);
    step->ack = read_number(&reader);
    expect(&reader, 0x90 | STEP_FIELDS);
    expect(&reader, STEP_TAG);
    step->step = read_number(&reader);
    const uint8_t *rows = read_column(&reader, &num_rows);
    const uint8_t *ids = read_column(&reader, &num_ids);
    read_column(&reader, &num_counts);
    read_column(&reader, &num_starts);
    read_logprobs(self, &reader, step);
    step->is_awaited = read_bool(&reader);
    const size_t num_bytes = 4 * (size_t)self->num;
    if (reader.has_failed || reader.at != reader.end || num_counts || num_starts ||
        num_rows != num_bytes || num_ids != num_bytes || step->step > INT64_MAX)
        return false;
    if (memcmp(rows, PyBytes_AS_STRING(self->core_rows), num_bytes))
        return false;
    const Numbers *core = self->core;
    if (epoch != self->core_epoch || step->seq != (uint64_t)core->received + 1 ||
        step->ack > (uint64_t)core->sent)
        return false;
    memcpy(self->ids, ids, num_bytes);
    return true;
}

/* True if both links may be sent what a step needs. */
static bool may_send(const StepRelay *self, const Step *step)
{
    const Numbers *client = self->client, *core = self->core;
    if (self->width && PyList_GET_SIZE(self->deferred) >= self->max_deferred)
        return false;
    const long long num_unacked = client->sent - client->acked;
    if (num_unacked >= client->window || num_unacked >= self->max_unacked ||
        !are_idle(client, client->acked))
        return false;
    const long long acked = (long long)step->ack > core->acked ? (long long)step->ack : core->acked;
    return !step->is_awaited || core->sent - acked < core->window;
}

/* True if each row has sent all that it had, and gets a plain token that is due at once; fills
 * `texts`, whose bytes are counted. An error is set where a text cannot be encoded.
 */
static bool are_plain(const StepRelay *self, size_t *num_bytes, bool *has_kinds)
{
    const RowLoops *loops = self->loops;
    const int64_t *rows = self->views[ROWS].buf, *order = self->views[ORDER].buf;
    const int64_t *others = self->views[OTHERS].buf;
    for (Py_ssize_t k = 0; k < self->views[OTHERS].len / 8; k++)
        if (loops->is_dirty[others[k]])
            return false;
    *num_bytes = 0, *has_kinds = false;
    for (Py_ssize_t k = 0; k < self->num; k++) {
        const int64_t row = rows[order[k]], length = loops->lengths[row];
        const uint32_t id = self->ids[order[k]];
        if (!loops->is_fast[row] || loops->is_dirty[row] || loops->intervals[row] != 1 ||
            length < 1 || length >= UINT32_MAX || loops->sent_tokens[row] != length ||
            loops->delivered_at[row] == 0.0 || length + 1 >= loops->max_tokens[row] ||
            !is_plain_for(loops, row, id))
            return false;
        Py_ssize_t size;
        PyObject *text = PyList_GET_ITEM(loops->texts, entry_of(loops, row, id));
        if (PyUnicode_AsUTF8AndSize(text, &size) == NULL)
            return false;
        self->texts[k] = text;
        *num_bytes += HEADER_BYTES + (size_t)size;
        *has_kinds |= size && loops->kinds[row];
    }
    return *num_bytes <= INT32_MAX;
}

/* Keep the log-probabilities of the step; -1: error. */
static int defer_logprobs(const StepRelay *self, const Step *step)
{
    PyObject *args[LOGPROB_FIELDS - 1] = {PyLong_FromLongLong(self->width)}, *columns = NULL;
    for (int at = 0; at < 3; at++)
        args[1 + at] = PyBytes_FromStringAndSize((const char *)step->columns[at].at,
                                                 (Py_ssize_t)step->columns[at].num_bytes);
    if (args[0] != NULL && args[1] != NULL && args[2] != NULL && args[3] != NULL)
        columns = PyObject_Vectorcall(columns_type, args, LOGPROB_FIELDS - 1, NULL);
    for (int at = 0; at < LOGPROB_FIELDS - 1; at++)
        Py_XDECREF(args[at]);
    const int failed = columns == NULL || PyList_Append(self->deferred, columns) < 0;
    Py_XDECREF(columns);
    return failed ? -1 : 0;
}

/* Append the tokens to the histories: 1; 0 where these have to grow first; -1: error. */
static int append(const StepRelay *self)
{
    RowLoops *loops = self->loops;
    const int64_t *rows = self->views[ROWS].buf;
    PyObject *given = PyObject_GetAttr(self->table, num_free_name);
    if (given == NULL)
        return -1;
    const Py_ssize_t num_free = PyLong_AsSsize_t(given);
    Py_DECREF(given);
    if (num_free == -1 && PyErr_Occurred())
        return -1;
    if (num_free < 0 || num_free > self->pages->num_stack)
        return 0;
    Py_ssize_t stopped;
    const Py_ssize_t left =
        append_values(self->pages, rows, self->ids, self->num, num_free, &stopped);
    if (left < 0)
        return 0;
    if (left != num_free) {
        PyObject *number = PyLong_FromSsize_t(left);
        const int failed = number == NULL || PyObject_SetAttr(self->table, num_free_name, number);
        Py_XDECREF(number);
        if (failed)
            return -1;
    }
    for (Py_ssize_t i = 0; i < self->num; i++) {
        loops->lengths[rows[i]]++;
        loops->last_ids[rows[i]] = self->ids[i];
        loops->is_dirty[rows[i]] = 1;
    }
    return 1;
}

/* ---- what is sent ----------------------------------------------------------------------- */

/* True if `write` takes a message; -1: error. */
static int write_message(PyObject *write, const uint8_t *data, const uint8_t *end)
{
    PyObject *message = PyBytes_FromStringAndSize((const char *)data, end - data);
    if (message == NULL)
        return -1;
    PyObject *taken = PyObject_CallOneArg(write, message);
    Py_DECREF(message);
    if (taken == NULL)
        return -1;
    const int is_taken = PyObject_IsTrue(taken);
    Py_DECREF(taken);
    return is_taken;
}

/* Report a step whose check is awaited, or acknowledge it if many are owed; 0 if a report that is due
 * was not taken; -1: error.
 */
static int answer_core(const StepRelay *self, const Step *step)
{
    Numbers *core = self->core;
    uint8_t data[16 * HEADER_BYTES], *at;
    if (drop_receipts(core) < 0) /* of reports and states: all None */
        return -1;
    if (step->is_awaited) {
        at = write_frame(data, self->core_epoch, (uint64_t)core->sent + 1, (uint64_t)core->received);
        at = write_array(at, REPORT_FIELDS);
        at = write_number(at, REPORT_TAG);
        at = write_number(at, step->step);
        at = write_column(at, 0);
        at = write_column(at, 0);
        const int is_taken = write_message(self->report, data, at);
        if (is_taken > 0 && count_sent(core, Py_None) < 0)
            return -1;
        return is_taken;
    }
    if (core->received - core->last_ack_sent > self->may_owe) {
        at = write_frame(data, self->core_epoch, (uint64_t)core->sent, (uint64_t)core->received);
        at = write_nil(at);
        const int is_taken = write_message(self->report, data, at);
        if (is_taken < 0)
            return -1;
        if (is_taken)
            core->last_ack_sent = core->received;
    }
    return 1;
}

static uint32_t value_of(const StepRelay *self, int column, Py_ssize_t k)
{
    const RowLoops *loops = self->loops;
    const int64_t at = ((const int64_t *)self->views[ORDER].buf)[k];
    const int64_t row = ((const int64_t *)self->views[ROWS].buf)[at];
    switch (column) {
    case 0:
        return loops->handles[row];
    case 1:
        return (uint32_t)loops->sent_chars[row];
    case 2:
        return (uint32_t)loops->sent_tokens[row];
    case 3:
        return self->ids[at];
    default:
        return PyUnicode_GET_LENGTH(self->texts[k]) ? (uint32_t)loops->kinds[row] : 0;
    }
}

static uint8_t *write_values(const StepRelay *self, uint8_t *at, int column)
{
    at = write_column(at, 4 * (uint32_t)self->num);
    for (Py_ssize_t k = 0; k < self->num; k++, at += 4) {
        const uint32_t value = value_of(self, column, k);
        memcpy(at, &value, 4);
    }
    return at;
}

/* The frame with the deltas of all rows, as msgspec encodes them. */
static uint8_t *write_deltas(const StepRelay *self, uint8_t *at, Span logprobs, bool has_kinds)
{
    const Numbers *client = self->client;
    at = write_frame(at, self->client_epoch, (uint64_t)client->sent + 1, (uint64_t)client->received);
    at = write_array(at, DELTAS_FIELDS);
    at = write_number(at, DELTAS_TAG);
    for (int column = 0; column < 3; column++)
        at = write_values(self, at, column);
    at = write_array(at, (uint32_t)self->num);
    for (Py_ssize_t k = 0; k < self->num; k++) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(self->texts[k], &size); /* kept since it was made */
        at = write_text(at, text, (uint32_t)size);
    }
    at = write_values(self, at, 3);
    at = write_column(at, 0); /* counts */
    at = write_column(at, 0); /* ended */
    at = write_array(at, 0);
    memcpy(at, logprobs.at, logprobs.num_bytes);
    at += logprobs.num_bytes;
    at = has_kinds ? write_values(self, at, 4) : write_column(at, 0);
    at = write_column(at, 0); /* entries with events, and these */
    return write_array(at, 0);
}

static double monotonic(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void add_span(const StepRelay *self, double begin)
{
    uint64_t *num_added = self->views[NUM_ADDED].buf;
    const uint64_t at = (*num_added)++ % ((uint64_t)self->views[BEGINS].len / 8);
    ((double *)self->views[BEGINS].buf)[at] = begin;
    ((double *)self->views[ENDS].buf)[at] = monotonic();
}

static void count_delivered(const StepRelay *self)
{
    RowLoops *loops = self->loops;
    const int64_t *rows = self->views[ROWS].buf, *order = self->views[ORDER].buf;
    const double *bounds = self->views[BOUNDS].buf;
    const Py_ssize_t num_bounds = self->views[BOUNDS].len / 8;
    int64_t *buckets = self->views[BUCKETS].buf, *counters = self->views[COUNTERS].buf;
    double *total = self->views[TOTAL].buf, last = -1.0;
    Py_ssize_t bucket = 0;
    const double now = monotonic();
    for (Py_ssize_t k = 0; k < self->num; k++) {
        const int64_t row = rows[order[k]];
        const double gap = now - loops->delivered_at[row];
        if (gap != last)
            bucket = bucket_of(bounds, num_bounds, last = gap);
        buckets[bucket]++;
        *total += gap;
        loops->delivered_at[row] = now;
        loops->sent_tokens[row]++;
        loops->sent_chars[row] += PyUnicode_GET_LENGTH(self->texts[k]);
        loops->is_dirty[row] = 0;
    }
    counters[NUM_MESSAGES]++;
    counters[NUM_DELTAS] += self->num;
    counters[NUM_DELIVERED] += self->num;
}

/* True if the deltas have left; -1: error. */
static int send_deltas(const StepRelay *self, size_t num_bytes, Span logprobs, bool has_kinds)
{
    const size_t most =
        16 * HEADER_BYTES + num_bytes + logprobs.num_bytes + 20 * (size_t)self->num;
    uint8_t few[2048], *data = most <= sizeof few ? few : PyMem_Malloc(most);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int is_taken = write_message(self->deliver, data, write_deltas(self, data, logprobs, has_kinds));
    if (data != few)
        PyMem_Free(data);
    if (is_taken > 0) {
        if (drop_receipts(self->client) < 0 || count_sent(self->client, self->receipt) < 0)
            return -1;
        count_delivered(self);
    }
    return is_taken;
}

/* take(message, now) -> what has become of it, see step_relay.py */
static PyObject *take(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    StepRelay *self = (StepRelay *)object;
    Step step;
    size_t num_bytes;
    bool has_kinds;
    if (num_args != 2 || !PyBytes_CheckExact(args[0]) || !PyFloat_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take: expected bytes and a float");
        return NULL;
    }
    if (!read_step(self, args[0], &step) || !may_send(self, &step) ||
        !are_plain(self, &num_bytes, &has_kinds)) {
        PyErr_Clear(); /* the other way tells */
        return PyLong_FromLong(NOT_TAKEN);
    }
    const int is_appended = append(self);
    if (is_appended <= 0)
        return is_appended < 0 ? NULL : PyLong_FromLong(NOT_TAKEN);
    if (self->width && defer_logprobs(self, &step) < 0)
        return NULL;
    heard(self->core, (long long)step.ack, PyFloat_AS_DOUBLE(args[1]));
    self->core->received = (long long)step.seq;
    self->step = (long long)step.step;
    const int is_answered = answer_core(self, &step);
    if (is_answered < 0)
        return NULL;
    const int is_sent = send_deltas(self, num_bytes, step.logprobs, has_kinds);
    if (is_sent < 0)
        return NULL;
    add_span(self, PyFloat_AS_DOUBLE(args[1]));
    return PyLong_FromLong(TAKEN | (is_answered ? 0 : UNREPORTED) | (is_sent ? 0 : UNSENT));
}

/* ---- the module ------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, "Relay a step."},
    {0},
};

static PyMemberDef members[] = {
    {"step", T_LONGLONG, offsetof(StepRelay, step), READONLY, NULL},
    {"connection", T_OBJECT_EX, offsetof(StepRelay, connection), READONLY, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_relay},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "slipstream_worker._native.StepRelay", sizeof(StepRelay), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

int add_step_relay(PyObject *module)
{
    if ((num_free_name = PyUnicode_InternFromString("num_free")) == NULL ||
        (numbers_type = type_of("slipstream_ipc._native", "LinkNumbers")) == NULL ||
        (pages_type = type_of("slipstream_ipc._native", "TokenPages")) == NULL ||
        (columns_type = (PyObject *)type_of("slipstream_ipc.messages", "LogprobColumns")) == NULL ||
        (loops_type = (PyTypeObject *)PyObject_GetAttrString(module, "RowLoops")) == NULL)
        return -1;
    return add_type(module, &spec) == NULL ? -1 : 0;
}
