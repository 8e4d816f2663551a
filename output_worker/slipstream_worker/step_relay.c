/* Relays steps in which streams get plain tokens; see step_relay.py.
 *
 * Everything that a step could be refused for is looked at before anything is written, so a step that
 * is not taken has had no effect. The rows were checked against the columns when the relay was made:
 * those of `loops` and `pages` do not change their size while these objects live.
 */
#include "module.h"

#include <structmember.h>
#include <time.h>

#include "relay.h"
#include "row_loops.h"
#include "token_pages.h"

#define MAX_CORE_ROWS (1 << 24)
#define MAX_WIDTH (1 << 16) /* of log-probabilities */

/* The outcome of a step, as in step_relay.py. */
enum { NOT_TAKEN = 0, TAKEN = 1, UNREPORTED = 2, UNSENT = 4 };

enum { ROWS, ORDER, OTHERS, PROMPT_LENS, BOUNDS, BUCKETS, TOTAL, COUNTERS, NUM_ADDED, BEGINS, ENDS, NUM_VIEWS };
enum { NUM_MESSAGES, NUM_DELTAS, NUM_DELIVERED, NUM_COUNTERS };

static PyTypeObject *numbers_type, *loops_type, *pages_type;
static PyObject *columns_type;
static PyObject *num_free_name;

/* The text of an entry. */
typedef struct {
    const uint8_t *at; /* NULL: of several tokens, `first` bytes behind the beginning of `utf8` */
    size_t first, num_bytes;
} Text;

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
    long long entry_bytes, token_bytes, budget; /* of a message */
    int32_t *places; /* by core row: the index of its row here; -1: none */
    size_t num_places;
    /* of the rows of the latest step: kept while steps have the same */
    uint8_t *last_rows; /* its column */
    Py_ssize_t num_last;
    bool is_single;      /* each got one token */
    int32_t *place_of;   /* by index, the row's place in the step; -1: none */
    int64_t *place_rows; /* by place */
    int64_t *entry_rows; /* by entry of the message */
    int32_t *entry_places;
    /* of a step */
    int64_t *counts; /* by place: tokens */
    int32_t *begins; /* by place: the first of them */
    int32_t *num_chars;
    Text *texts; /* by entry */
    uint32_t *ids;
    uint8_t *utf8; /* the texts of several tokens */
    size_t room, text_room;
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
    PyMem_Free(self->places);
    PyMem_Free(self->last_rows);
    PyMem_Free(self->place_of);
    PyMem_Free(self->place_rows);
    PyMem_Free(self->entry_rows);
    PyMem_Free(self->entry_places);
    PyMem_Free(self->counts);
    PyMem_Free(self->begins);
    PyMem_Free(self->num_chars);
    PyMem_Free(self->texts);
    PyMem_Free(self->ids);
    PyMem_Free(self->utf8);
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

/* Note where each core row is, all of them different; -1: error. */
static int place_rows(StepRelay *self)
{
    const Column rows = {(const uint8_t *)PyBytes_AS_STRING(self->core_rows), 0};
    for (Py_ssize_t at = 0; at < self->num; at++)
        if (value_at(rows, at) >= self->num_places)
            self->num_places = (size_t)value_at(rows, at) + 1;
    if (self->num_places > MAX_CORE_ROWS) {
        PyErr_SetString(PyExc_IndexError, "StepRelay: core rows that are none");
        return -1;
    }
    self->places = PyMem_Malloc((self->num_places + 1) * sizeof *self->places);
    if (self->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->places, 0xff, self->num_places * sizeof *self->places);
    for (Py_ssize_t at = 0; at < self->num; at++) {
        int32_t *place = &self->places[value_at(rows, at)];
        if (*place >= 0) {
            PyErr_SetString(PyExc_IndexError, "StepRelay: core rows that come twice");
            return -1;
        }
        *place = (int32_t)at;
    }
    return 0;
}

/* Room for so many ids; false with an error set where there is none. */
static bool reserve_ids(StepRelay *self, size_t num)
{
    if (num <= self->room)
        return true;
    uint32_t *ids = PyMem_Realloc(self->ids, num * sizeof *ids);
    if (ids == NULL) {
        PyErr_NoMemory();
        return false;
    }
    self->ids = ids, self->room = num;
    return true;
}

/* Room for so many bytes of texts, likewise. */
static bool reserve_text(StepRelay *self, size_t num)
{
    if (num <= self->text_room)
        return true;
    uint8_t *utf8 = PyMem_Realloc(self->utf8, 2 * num);
    if (utf8 == NULL) {
        PyErr_NoMemory();
        return false;
    }
    self->utf8 = utf8, self->text_room = 2 * num;
    return true;
}

/* StepRelay(core, client, loops, pages, table, core_rows, (rows, order, others, prompt_lens), report,
 *           deliver, receipt, (bounds, buckets, total, counters), (num_added, begins, ends),
 *           max_unacked, may_owe, connection, (width, deferred, max_deferred),
 *           (entry_bytes, token_bytes, budget)) */
static PyObject *new_relay(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *core, *client, *loops, *pages, *table, *core_rows, *report, *deliver, *receipt;
    PyObject *connection;
    PyObject *columns[NUM_VIEWS];
    PyObject *deferred;
    long long max_unacked, may_owe, width, max_deferred, entry_bytes, token_bytes, budget;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "StepRelay: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!O!O!OS(OOOO)OOO!(OOOO)(OOO)LLO(LOL)(LLL)", numbers_type, &core,
                          numbers_type, &client, loops_type, &loops, pages_type, &pages, &table,
                          &core_rows, &columns[ROWS], &columns[ORDER], &columns[OTHERS],
                          &columns[PROMPT_LENS], &report, &deliver, &PyList_Type, &receipt,
                          &columns[BOUNDS], &columns[BUCKETS], &columns[TOTAL], &columns[COUNTERS],
                          &columns[NUM_ADDED], &columns[BEGINS], &columns[ENDS], &max_unacked,
                          &may_owe, &connection, &width, &deferred, &max_deferred, &entry_bytes,
                          &token_bytes, &budget))
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
    self->entry_bytes = entry_bytes, self->token_bytes = token_bytes, self->budget = budget;
    self->num = PyBytes_GET_SIZE(core_rows) / 4;
    self->core_epoch = PyLong_AsUnsignedLongLong(self->core->epoch);
    self->client_epoch = PyLong_AsUnsignedLongLong(self->client->epoch);
    if (PyErr_Occurred())
        goto failed;
    const int written = PyBUF_WRITABLE;
    if (take_view(self, ROWS, columns[ROWS], self->num, PyBUF_SIMPLE) < 0 ||
        take_view(self, ORDER, columns[ORDER], self->num, PyBUF_SIMPLE) < 0 ||
        take_view(self, OTHERS, columns[OTHERS], -1, PyBUF_SIMPLE) < 0 ||
        take_view(self, PROMPT_LENS, columns[PROMPT_LENS], self->loops->num_rows, PyBUF_SIMPLE) < 0 ||
        take_view(self, BOUNDS, columns[BOUNDS], -1, PyBUF_SIMPLE) < 0 ||
        take_view(self, BUCKETS, columns[BUCKETS], self->views[BOUNDS].len / 8 + 1, written) < 0 ||
        take_view(self, TOTAL, columns[TOTAL], 1, written) < 0 ||
        take_view(self, COUNTERS, columns[COUNTERS], NUM_COUNTERS, written) < 0 ||
        take_view(self, NUM_ADDED, columns[NUM_ADDED], 1, written) < 0 ||
        take_view(self, BEGINS, columns[BEGINS], -1, written) < 0 ||
        take_view(self, ENDS, columns[ENDS], self->views[BEGINS].len / 8, written) < 0 ||
        check_rows(self) < 0 || place_rows(self) < 0)
        goto failed;
    if (self->views[BEGINS].len == 0) {
        PyErr_SetString(PyExc_ValueError, "StepRelay: no room for spans");
        goto failed;
    }
    const size_t room = (size_t)self->num + 1;
    self->last_rows = PyMem_Calloc(room, 4);
    self->place_of = PyMem_Calloc(room, sizeof *self->place_of);
    self->place_rows = PyMem_Calloc(room, sizeof *self->place_rows);
    self->entry_rows = PyMem_Calloc(room, sizeof *self->entry_rows);
    self->entry_places = PyMem_Calloc(room, sizeof *self->entry_places);
    self->counts = PyMem_Calloc(room, sizeof *self->counts);
    self->begins = PyMem_Calloc(room, sizeof *self->begins);
    self->num_chars = PyMem_Calloc(room, sizeof *self->num_chars);
    self->texts = PyMem_Calloc(room, sizeof *self->texts);
    if (!self->last_rows || !self->place_of || !self->place_rows || !self->entry_rows ||
        !self->entry_places || !self->counts || !self->begins || !self->num_chars || !self->texts) {
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
    uint64_t seq, ack, step;
    bool is_awaited, has_kinds, is_even; /* is_even: a token of each row that it has */
    Py_ssize_t num;                      /* rows that it has */
    size_t num_tokens, num_bytes;        /* num_bytes: of their texts */
    Column counts, starts;
    Logprobs logprobs;
} Step;

/* A stream with too many unacknowledged tokens is not scheduled: several are not left to owe. */
static bool is_reported(const Step *step) { return step->is_awaited || step->counts.num_bytes; }

/* Put the rows of the step into the order of the message's entries: ascending, or as they came with
 * their log-probabilities.
 */
static void place_entries(StepRelay *self, Py_ssize_t num)
{
    const int64_t *rows = self->views[ROWS].buf, *order = self->views[ORDER].buf;
    for (Py_ssize_t k = 0, found = 0; found < num; k++) {
        const int32_t place = self->width ? (int32_t)k : self->place_of[order[k]];
        if (place < 0)
            continue;
        self->entry_places[found] = place;
        self->entry_rows[found++] = self->width ? self->place_rows[k] : rows[order[k]];
    }
}

/* Find the rows of a step, each of them once. */
static bool find_rows(StepRelay *self, Py_ssize_t num, Column core_rows)
{
    if (num == self->num_last && !memcmp(core_rows.at, self->last_rows, core_rows.num_bytes))
        return true;
    const int64_t *rows = self->views[ROWS].buf;
    self->num_last = 0, self->is_single = false;
    memset(self->place_of, 0xff, (size_t)self->num * sizeof *self->place_of);
    for (Py_ssize_t place = 0; place < num; place++) {
        const uint32_t core_row = value_at(core_rows, place);
        const int32_t at = core_row < self->num_places ? self->places[core_row] : -1;
        if (at < 0 || self->place_of[at] >= 0)
            return false;
        self->place_of[at] = (int32_t)place;
        self->place_rows[place] = rows[at];
    }
    place_entries(self, num);
    memcpy(self->last_rows, core_rows.at, core_rows.num_bytes);
    self->num_last = num;
    return true;
}

/* Note how many tokens each row of a step gets, all of them some. */
static bool count_tokens(StepRelay *self, const Step *step)
{
    if (self->is_single && !step->counts.num_bytes)
        return true;
    int32_t begin = 0;
    self->is_single = false;
    for (Py_ssize_t place = 0; place < step->num; place++) {
        self->begins[place] = begin;
        self->counts[place] = count_at(step->counts, place);
        if (!self->counts[place])
            return false;
        begin += (int32_t)self->counts[place];
    }
    self->is_single = step->is_even;
    return true;
}

/* True if the message is the link's next step, of some of the rows. */
static bool read_step(StepRelay *self, PyObject *message, Step *step)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message);
    Reader reader = {data, data + PyBytes_GET_SIZE(message), false};
    const Numbers *core = self->core;
    expect(&reader, 0x94);
    const uint64_t epoch = read_number(&reader);
    step->seq = read_number(&reader);
    step->ack = read_number(&reader);
    expect(&reader, 0x90 | STEP_FIELDS);
    expect(&reader, STEP_TAG);
    step->step = read_number(&reader);
    if (reader.has_failed || epoch != self->core_epoch || step->step > INT64_MAX ||
        step->seq != (uint64_t)core->received + 1 || step->ack > (uint64_t)core->sent)
        return false;
    const Column core_rows = take_column(&reader), ids = take_column(&reader);
    step->num = (Py_ssize_t)(core_rows.num_bytes / 4);
    step->counts = take_column(&reader);
    step->starts = take_column(&reader);
    step->num_tokens = total_of(&reader, step->counts, step->num);
    step->logprobs = take_logprobs(&reader, step->num_tokens);
    step->is_awaited = read_bool(&reader);
    step->is_even = step->num_tokens == (size_t)step->num;
    if (reader.has_failed || reader.at != reader.end || !step->num || core_rows.num_bytes % 4 ||
        step->num > self->num || ids.num_bytes != 4 * step->num_tokens ||
        step->starts.num_bytes != step->counts.num_bytes ||
        ids.num_bytes > INT32_MAX || step->logprobs.width != (uint64_t)self->width ||
        !find_rows(self, step->num, core_rows) || !count_tokens(self, step) || !reserve_ids(self, step->num_tokens))
        return false;
    memcpy(self->ids, ids.at, ids.num_bytes);
    return true;
}

/* True if its log-probabilities are of a token of each row, in their order, or there are none. */
static bool may_defer(const StepRelay *self, const Step *step)
{
    if (!self->width)
        return true;
    return step->num == self->num && !step->counts.num_bytes &&
           !memcmp(self->last_rows, PyBytes_AS_STRING(self->core_rows), 4 * (size_t)step->num) &&
           PyList_GET_SIZE(self->deferred) < self->max_deferred;
}

/* True if both links may be sent what a step needs. */
static bool may_send(const StepRelay *self, const Step *step)
{
    const Numbers *client = self->client, *core = self->core;
    const long long num_unacked = client->sent - client->acked;
    if (num_unacked >= client->window || num_unacked >= self->max_unacked ||
        !are_idle(client, client->acked))
        return false;
    const long long acked = (long long)step->ack > core->acked ? (long long)step->ack : core->acked;
    return !is_reported(step) || core->sent - acked < core->window;
}

/* The bytes of a text, encoded once; NULL: error. */
static const char *utf8_of(PyObject *text, Py_ssize_t *size)
{
    if (!PyUnicode_IS_COMPACT_ASCII(text))
        return PyUnicode_AsUTF8AndSize(text, size);
    *size = PyUnicode_GET_LENGTH(text);
    return (const char *)PyUnicode_1BYTE_DATA(text);
}

/* Add the text of a token to that of an entry; false if it has none, where an error may be set. */
static bool add_text(StepRelay *self, int64_t row, uint32_t id, Text *text, int64_t *num_chars)
{
    const RowLoops *loops = self->loops;
    if (!is_plain_for(loops, row, id))
        return false;
    PyObject *next = PyList_GET_ITEM(loops->texts, entry_of(loops, row, id));
    Py_ssize_t size;
    const char *utf8 = utf8_of(next, &size);
    if (utf8 == NULL || !reserve_text(self, text->first + text->num_bytes + (size_t)size))
        return false;
    if (size) /* without any, utf8 may be NULL */
        memcpy(self->utf8 + text->first + text->num_bytes, utf8, (size_t)size);
    text->num_bytes += (size_t)size;
    *num_chars += PyUnicode_GET_LENGTH(next);
    return true;
}

/* True if the row has sent all that it had, and gets `count` tokens that are due at once. */
static inline bool is_due(const RowLoops *loops, int64_t row, int64_t count)
{
    const int64_t length = loops->lengths[row], end = length + count;
    return loops->is_fast[row] && !loops->is_dirty[row] && loops->intervals[row] == 1 && length >= 1 &&
           end <= UINT32_MAX && loops->sent_tokens[row] == length && loops->delivered_at[row] != 0.0 &&
           end < loops->max_tokens[row];
}

/* True if the rows get plain tokens that are due at once; notes their texts. An error may be set where
 * they do not.
 */
static bool take_spans(StepRelay *self, Step *step)
{
    const RowLoops *loops = self->loops;
    size_t first = 0;
    for (Py_ssize_t k = 0; k < step->num; k++) {
        const int64_t row = self->entry_rows[k], count = self->counts[self->entry_places[k]];
        const uint32_t *id = self->ids + self->begins[self->entry_places[k]];
        Text text = {NULL, first, 0};
        int64_t num_chars = 0;
        if (!is_due(loops, row, count))
            return false;
        for (const uint32_t *behind = id + count; id < behind; id++)
            if (!add_text(self, row, *id, &text, &num_chars))
                return false;
        first += text.num_bytes;
        if (first > INT32_MAX)
            return false;
        self->texts[k] = text, self->num_chars[k] = (int32_t)num_chars;
        step->has_kinds |= num_chars && loops->kinds[row];
    }
    step->num_bytes = first;
    return true;
}

/* Likewise where each gets one token. */
static bool take_single(StepRelay *self, Step *step)
{
    const RowLoops *loops = self->loops;
    for (Py_ssize_t k = 0; k < step->num; k++) {
        const int64_t row = self->entry_rows[k];
        const uint32_t id = self->ids[self->entry_places[k]];
        if (!is_due(loops, row, 1) || !is_plain_for(loops, row, id))
            return false;
        PyObject *text = PyList_GET_ITEM(loops->texts, entry_of(loops, row, id));
        Py_ssize_t size;
        const char *utf8 = utf8_of(text, &size);
        if (utf8 == NULL)
            return false;
        self->texts[k].at = (const uint8_t *)utf8, self->texts[k].num_bytes = (size_t)size;
        self->num_chars[k] = (int32_t)PyUnicode_GET_LENGTH(text);
        step->num_bytes += (size_t)size;
        step->has_kinds |= size && loops->kinds[row];
    }
    return true;
}

/* True if the rows of the step are plain, begin where they end here, and fit into a message, and no
 * other row has anything to be sent.
 */
static bool are_plain(StepRelay *self, Step *step)
{
    const RowLoops *loops = self->loops;
    const int64_t *rows = self->views[ROWS].buf, *others = self->views[OTHERS].buf;
    const int64_t *prompt_lens = self->views[PROMPT_LENS].buf;
    for (Py_ssize_t k = 0; k < self->views[OTHERS].len / 8; k++)
        if (loops->is_dirty[others[k]])
            return false;
    for (Py_ssize_t at = 0; at < self->num && step->num < self->num; at++)
        if (self->place_of[at] < 0 && loops->is_dirty[rows[at]])
            return false;
    if (self->entry_bytes * step->num + self->token_bytes * (long long)step->num_tokens >
        self->budget)
        return false;
    step->num_bytes = 0, step->has_kinds = false;
    for (Py_ssize_t place = 0; place < step->num && step->starts.num_bytes; place++) {
        const int64_t row = self->place_rows[place];
        if (value_at(step->starts, place) != prompt_lens[row] + loops->lengths[row])
            return false;
    }
    if (!(step->is_even ? take_single(self, step) : take_spans(self, step)))
        return false;
    return step->num_bytes <= INT32_MAX;
}

/* Keep the log-probabilities of the step; -1: error. */
static int defer_logprobs(const StepRelay *self, const Step *step)
{
    PyObject *columns = logprob_columns(&step->logprobs, columns_type);
    const int failed = columns == NULL || PyList_Append(self->deferred, columns) < 0;
    Py_XDECREF(columns);
    return failed ? -1 : 0;
}

/* Append the tokens to the histories: 1; 0 where these have to grow first; -1: error. */
static int append(const StepRelay *self, const Step *step)
{
    RowLoops *loops = self->loops;
    PyObject *given = PyObject_GetAttr(self->table, num_free_name);
    if (given == NULL)
        return -1;
    const Py_ssize_t num_free = PyLong_AsSsize_t(given);
    Py_DECREF(given);
    if (num_free == -1 && PyErr_Occurred())
        return -1;
    if (num_free < 0 || num_free > self->pages->num_stack)
        return 0;
    const int64_t *own = self->place_rows, *counts = step->is_even ? NULL : self->counts;
    Py_ssize_t stopped;
    const Py_ssize_t left =
        append_spans(self->pages, own, counts, self->ids, step->num, num_free, &stopped);
    if (left < 0)
        return 0;
    if (left != num_free) {
        PyObject *number = PyLong_FromSsize_t(left);
        const int failed = number == NULL || PyObject_SetAttr(self->table, num_free_name, number);
        Py_XDECREF(number);
        if (failed)
            return -1;
    }
    const uint32_t *last = self->ids - 1;
    for (Py_ssize_t place = 0; place < step->num; place++) {
        const int64_t count = counts == NULL ? 1 : counts[place];
        loops->lengths[own[place]] += count;
        loops->last_ids[own[place]] = *(last += count);
        loops->is_dirty[own[place]] = 1;
    }
    return 1;
}

/* ---- what is sent ----------------------------------------------------------------------- */

/* Report a step if that is due, or acknowledge it if many are owed; 0 if a report that is due was not
 * taken; -1: error.
 */
static int answer_core(const StepRelay *self, const Step *step)
{
    Numbers *core = self->core;
    if (drop_receipts(core) < 0) /* of reports and states: all None */
        return -1;
    if (is_reported(step)) {
        uint8_t data[16 * HEADER_BYTES], *at;
        at = write_frame(data, self->core_epoch, (uint64_t)core->sent + 1, (uint64_t)core->received);
        at = write_array(at, REPORT_FIELDS);
        at = write_number(at, REPORT_TAG);
        at = write_number(at, step->step);
        at = write_column(at, 0);
        at = write_column(at, 0);
        const int is_taken = hand_over(self->report, data, at);
        if (is_taken > 0 && count_sent(core, Py_None) < 0)
            return -1;
        return is_taken;
    }
    if (core->received - core->last_ack_sent > self->may_owe &&
        send_ack(core, self->core_epoch, self->report) < 0)
        return -1;
    return 1;
}

static uint8_t *write_handles(const StepRelay *self, const Step *step, uint8_t *to)
{
    to = write_column(to, 4 * (uint32_t)step->num);
    for (Py_ssize_t k = 0; k < step->num; k++, to += 4)
        memcpy(to, &self->loops->handles[self->entry_rows[k]], 4);
    return to;
}

/* What a column has of each entry's row. */
static uint8_t *write_values(const StepRelay *self, const Step *step, uint8_t *to,
                             const int64_t *column)
{
    to = write_column(to, 4 * (uint32_t)step->num);
    for (Py_ssize_t k = 0; k < step->num; k++, to += 4) {
        const uint32_t value = (uint32_t)column[self->entry_rows[k]];
        memcpy(to, &value, 4);
    }
    return to;
}

static uint8_t *write_kinds(const StepRelay *self, const Step *step, uint8_t *to)
{
    to = write_column(to, 4 * (uint32_t)step->num);
    for (Py_ssize_t k = 0; k < step->num; k++, to += 4) {
        const int64_t kind = self->loops->kinds[self->entry_rows[k]];
        const uint32_t value = self->num_chars[k] ? (uint32_t)kind : 0;
        memcpy(to, &value, 4);
    }
    return to;
}

static uint8_t *write_counts(const StepRelay *self, const Step *step, uint8_t *to)
{
    if (step->is_even)
        return write_column(to, 0);
    to = write_column(to, 4 * (uint32_t)step->num);
    for (Py_ssize_t k = 0; k < step->num; k++, to += 4) {
        const uint32_t count = (uint32_t)self->counts[self->entry_places[k]];
        memcpy(to, &count, 4);
    }
    return to;
}

static uint8_t *write_ids(const StepRelay *self, const Step *step, uint8_t *to)
{
    to = write_column(to, 4 * (uint32_t)step->num_tokens);
    if (step->is_even) {
        for (Py_ssize_t k = 0; k < step->num; k++, to += 4)
            memcpy(to, &self->ids[self->entry_places[k]], 4);
        return to;
    }
    for (Py_ssize_t k = 0; k < step->num; k++) {
        const uint32_t *id = self->ids + self->begins[self->entry_places[k]];
        for (const uint32_t *end = id + self->counts[self->entry_places[k]]; id < end; id++, to += 4)
            memcpy(to, id, 4);
    }
    return to;
}

static uint8_t *write_texts(const StepRelay *self, const Step *step, uint8_t *to)
{
    to = write_array(to, (uint32_t)step->num);
    for (Py_ssize_t k = 0; k < step->num; k++) {
        const Text text = self->texts[k];
        to = write_text_header(to, (uint32_t)text.num_bytes);
        if (text.num_bytes)
            memcpy(to, text.at == NULL ? self->utf8 + text.first : text.at, text.num_bytes);
        to += text.num_bytes;
    }
    return to;
}

/* The frame with the deltas of the step's rows, as msgspec encodes them. */
static uint8_t *write_deltas(const StepRelay *self, const Step *step, uint8_t *to)
{
    const Numbers *client = self->client;
    to = write_frame(to, self->client_epoch, (uint64_t)client->sent + 1, (uint64_t)client->received);
    to = write_array(to, DELTAS_FIELDS);
    to = write_number(to, DELTAS_TAG);
    to = write_handles(self, step, to);
    to = write_values(self, step, to, self->loops->sent_chars);
    to = write_values(self, step, to, self->loops->sent_tokens);
    to = write_texts(self, step, to);
    to = write_ids(self, step, to);
    to = write_counts(self, step, to);
    to = write_column(to, 0); /* ended */
    to = write_array(to, 0);
    memcpy(to, step->logprobs.whole.at, step->logprobs.whole.num_bytes);
    to += step->logprobs.whole.num_bytes;
    to = step->has_kinds ? write_kinds(self, step, to) : write_column(to, 0);
    to = write_column(to, 0); /* entries with events, and these */
    return write_array(to, 0);
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

static void count_delivered(const StepRelay *self, const Step *step)
{
    RowLoops *loops = self->loops;
    const double *bounds = self->views[BOUNDS].buf;
    const Py_ssize_t num_bounds = self->views[BOUNDS].len / 8;
    int64_t *buckets = self->views[BUCKETS].buf, *counters = self->views[COUNTERS].buf;
    double *total = self->views[TOTAL].buf, last = -1.0;
    Py_ssize_t bucket = 0;
    const double now = monotonic();
    for (Py_ssize_t k = 0; k < step->num; k++) {
        const int64_t row = self->entry_rows[k];
        const double gap = now - loops->delivered_at[row];
        if (gap != last)
            bucket = bucket_of(bounds, num_bounds, last = gap);
        buckets[bucket]++;
        *total += gap;
        loops->delivered_at[row] = now;
        loops->sent_tokens[row] += step->is_even ? 1 : self->counts[self->entry_places[k]];
        loops->sent_chars[row] += self->num_chars[k];
        loops->is_dirty[row] = 0;
    }
    counters[NUM_MESSAGES]++;
    counters[NUM_DELTAS] += step->num;
    counters[NUM_DELIVERED] += (int64_t)step->num_tokens;
}

/* True if the deltas have left; -1: error. */
static int send_deltas(StepRelay *self, const Step *step)
{
    const size_t most = 16 * HEADER_BYTES + step->num_bytes + step->logprobs.whole.num_bytes +
                        (20 + HEADER_BYTES) * (size_t)step->num + 4 * step->num_tokens;
    uint8_t few[2048], *data = most <= sizeof few ? few : PyMem_Malloc(most);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int is_taken = hand_over(self->deliver, data, write_deltas(self, step, data));
    if (data != few)
        PyMem_Free(data);
    if (is_taken > 0) {
        if (drop_receipts(self->client) < 0 || count_sent(self->client, self->receipt) < 0)
            return -1;
        count_delivered(self, step);
    }
    return is_taken;
}

/* take(message, now) -> what has become of it, see step_relay.py */
static PyObject *take(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    StepRelay *self = (StepRelay *)object;
    Step step;
    if (num_args != 2 || !PyBytes_CheckExact(args[0]) || !PyFloat_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take: expected bytes and a float");
        return NULL;
    }
    if (!read_step(self, args[0], &step) || !may_defer(self, &step) || !may_send(self, &step) ||
        !are_plain(self, &step)) {
        PyErr_Clear(); /* the other way tells */
        return PyLong_FromLong(NOT_TAKEN);
    }
    const int is_appended = append(self, &step);
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
    const int is_sent = send_deltas(self, &step);
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
