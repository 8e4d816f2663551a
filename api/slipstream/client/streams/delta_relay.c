/* Relays messages that continue streams to these; see delta_relay.py.
 *
 * Everything that a message could be left alone for is looked at before anything is written, so one
 * that is not taken has had no effect, except that it was read.
 */
#include "module.h"

#include <errno.h>
#include <structmember.h>
#include <sys/socket.h>

#include "plain_deltas.h"
#include "slots.h"

#define PREFIX_BYTES 4 /* a message's length, u32 little-endian, as in local_socket.py */
#define CHUNK_BYTES (1 << 14)

/* Fields, in the order of their names. */
enum { HANDLES, CHARS, TOKENS, ITEMS, IS_AHEAD, DELIVERY, IN_FOUND };
enum { PUSH, WAKEUP, WANTS_WHOLE, DELTAS, IS_OVER, IN_STATE };
enum { TEXT, BATCH, ENTRY, SKIP, IN_DELTA };
#define IN_DELTAS (DELTAS_FIELDS - 1)
#define IN_BATCH 7

static const char *const found_fields[] = {"handles", "chars",    "tokens",
                                           "items",   "is_ahead", "delivery"};
static const char *const state_fields[] = {"push", "wakeup", "wants_whole", "deltas", "is_over"};
static const char *const delta_fields[] = {"text", "_batch", "_entry", "_skip"};
static const char *const deltas_fields[] = {"handles",  "chars", "tokens",        "texts",
                                            "token_ids", "counts", "ended",       "ends",
                                            "logprobs", "kinds", "event_entries", "events"};
static const char *const batch_fields[] = {"message",      "first_at",   "last_at", "ends",
                                           "has_one_each", "has_events", "_objects"};

/* Types, in the order in which `prepare` gets them, and where their fields are. */
enum { NUMBERS, LOGPROB_COLUMNS, FOUND_TYPE, STATE_TYPE, DELTA_TYPE, DELTAS_TYPE, BATCH_TYPE,
       NUM_TYPES };
static PyTypeObject *types[NUM_TYPES];
static Py_ssize_t in_found[IN_FOUND], in_state[IN_STATE], in_delta[IN_DELTA], in_deltas[IN_DELTAS],
    in_batch[IN_BATCH];
static PyObject *no_ends;

/* The parts of a delivery, see `Delivery` in delta_relay.py. */
enum { GROUP, ITEMS_OF, ADD, NUMBERS_IN_GROUP, RING, FIRST, DELIVERY_PARTS };

static PyObject *no_bytes, *no_tuple, *zero;
static PyObject *fd_name, *latest_name, *run_name, *begin_run_name, *is_bare_name, *unread_name,
    *wake_name, *append_name, *ring_name, *find_name;

enum { CONNECTION, MESSAGES, TAKE_IN, SEND, RECEIVED, KEPT, DELIVERY_OF, MAKE_ROOM, WAKE, WATCHED,
       NUM_HELD };

typedef struct {
    PyObject_HEAD
    Numbers *link;
    PyObject *held[NUM_HELD];
    uint64_t epoch;
    long long may_owe;
    Py_ssize_t most_kept;   /* bytes of ids */
    Py_ssize_t most_unread; /* deltas of a stream */
    long fd;                /* of the connection, while that is open */
    char is_socket;         /* else messages arrive in MESSAGES by themselves */
    char is_spent;          /* the connection has to be looked at */
} DeltaRelay;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    DeltaRelay *self = (DeltaRelay *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->link);
    for (int at = 0; at < NUM_HELD; at++)
        Py_VISIT(self->held[at]);
    return 0;
}

static int clear(PyObject *object)
{
    DeltaRelay *self = (DeltaRelay *)object;
    Py_CLEAR(self->link);
    for (int at = 0; at < NUM_HELD; at++)
        Py_CLEAR(self->held[at]);
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

/* The descriptor of a connection; -1 if it is not open, or with an error set. */
static long fd_of(PyObject *connection)
{
    PyObject *given = PyObject_GetAttr(connection, fd_name);
    const long fd = given == NULL ? -1 : PyLong_AsLong(given);
    Py_XDECREF(given);
    return fd;
}

/* DeltaRelay(link, connection, is_socket, received, kept, (delivery_of, make_room, wake), watched,
 *            may_owe, most_kept, most_unread) */
static PyObject *new_relay(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *link, *connection, *received, *kept, *delivery_of, *make_room, *wake, *watched;
    int is_socket;
    long long may_owe;
    Py_ssize_t most_kept, most_unread;
    if (types[NUMBERS] == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "DeltaRelay: `prepare` comes first");
        return NULL;
    }
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "DeltaRelay: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OpOO(OOO)O!Lnn", types[NUMBERS], &link, &connection, &is_socket,
                          &received, &kept, &delivery_of, &make_room, &wake, &PyTuple_Type,
                          &watched, &may_owe, &most_kept, &most_unread))
        return NULL;
    DeltaRelay *self = (DeltaRelay *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->link = (Numbers *)Py_NewRef(link);
    self->is_socket = (char)is_socket, self->may_owe = may_owe;
    self->most_kept = most_kept, self->most_unread = most_unread;
    self->held[CONNECTION] = Py_NewRef(connection);
    self->held[MESSAGES] = PyObject_GetAttrString(connection, "messages");
    self->held[TAKE_IN] = PyObject_GetAttrString(connection, "take_in");
    self->held[SEND] = PyObject_GetAttrString(connection, "send");
    self->held[RECEIVED] = Py_NewRef(received), self->held[KEPT] = Py_NewRef(kept);
    self->held[DELIVERY_OF] = Py_NewRef(delivery_of), self->held[WATCHED] = Py_NewRef(watched);
    self->held[MAKE_ROOM] = Py_NewRef(make_room), self->held[WAKE] = Py_NewRef(wake);
    self->epoch = PyLong_AsUnsignedLongLong(self->link->epoch);
    self->fd = PyErr_Occurred() ? -1 : fd_of(connection);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- its objects ------------------------------------------------------------------------ */

/* The Deltas; NULL: error. columns: of the streams, as objects. */
static PyObject *deltas_of(const Plain *plain, PyObject *const *columns)
{
    PyObject *ids = bytes_of(plain->ids), *deltas = NULL;
    PyObject *counts = plain->counts.num_bytes ? bytes_of(plain->counts) : Py_NewRef(no_bytes);
    PyObject *logprobs = logprob_columns(&plain->logprobs, (PyObject *)types[LOGPROB_COLUMNS]);
    if (ids != NULL && counts != NULL && logprobs != NULL) {
        PyObject *const values[IN_DELTAS] = {
            columns[0], columns[1], columns[2], plain->texts, ids, counts,
            no_bytes, no_tuple, logprobs, no_bytes, no_bytes, no_tuple};
        deltas = new_instance(types[DELTAS_TYPE], in_deltas, values, IN_DELTAS);
    }
    Py_XDECREF(ids);
    Py_XDECREF(counts);
    Py_XDECREF(logprobs);
    return deltas;
}

/* The DeltaBatch of a message that has arrived at this time; NULL: error. */
static PyObject *batch_of(const Plain *plain, PyObject *deltas, PyObject *now)
{
    PyObject *has_one_each = plain->counts.num_bytes ? Py_False : Py_True;
    PyObject *const values[] = {deltas, now, now, no_ends, has_one_each, Py_False, Py_None};
    return new_instance(types[BATCH_TYPE], in_batch, values, IN_BATCH);
}

/* ---- what becomes of it ----------------------------------------------------------------- */

/* True if this is a run for these handles, to which as much as these have may be added. */
static bool is_run_of(const DeltaRelay *self, PyObject *run, PyObject *handles)
{
    if (!PyTuple_CheckExact(run) || PyTuple_GET_SIZE(run) != 3 ||
        PyTuple_GET_ITEM(run, 0) != handles)
        return false;
    for (int at = 1; at < 3; at++) {
        PyObject *column = PyTuple_GET_ITEM(run, at);
        if (!PyByteArray_CheckExact(column) || PyByteArray_GET_SIZE(column) >= self->most_kept)
            return false;
    }
    return true;
}

/* Add a column to a bytearray; one of ones where it has no bytes. -1: error. */
static int extend(PyObject *array, Column column, Py_ssize_t num)
{
    const Py_ssize_t size = PyByteArray_GET_SIZE(array);
    if (PyByteArray_Resize(array, size + (column.num_bytes ? (Py_ssize_t)column.num_bytes : 4 * num)))
        return -1;
    char *to = PyByteArray_AS_STRING(array) + size;
    const uint32_t one = 1;
    if (column.num_bytes)
        memcpy(to, column.at, column.num_bytes);
    else
        for (Py_ssize_t at = 0; at < num; at++)
            memcpy(to + 4 * at, &one, 4);
    return 0;
}

/* Add the ids of the message to a run; without counts, each of its messages has an id of each handle.
 * -1: error.
 */
static int add_ids(PyObject *run, const Plain *plain)
{
    PyObject *ids = PyTuple_GET_ITEM(run, 1), *counts = PyTuple_GET_ITEM(run, 2);
    const Column none = {0};
    const bool was_even = !PyByteArray_GET_SIZE(counts);
    if (was_even && plain->counts.num_bytes &&
        extend(counts, none, PyByteArray_GET_SIZE(ids) / 4) < 0)
        return -1;
    if ((!was_even || plain->counts.num_bytes) && extend(counts, plain->counts, plain->num) < 0)
        return -1;
    return extend(ids, plain->ids, 0);
}

/* Keep the ids of the message for a resubmission; -1: error. */
static int keep_ids(const DeltaRelay *self, const Plain *plain, PyObject *handles)
{
    PyObject *kept = self->held[KEPT];
    PyObject *run = PyObject_GetAttr(kept, run_name);
    if (run != NULL && !is_run_of(self, run, handles)) {
        Py_DECREF(run);
        run = PyObject_CallMethodOneArg(kept, begin_run_name, handles);
        if (run != NULL && !is_run_of(self, run, handles)) {
            PyErr_SetString(PyExc_TypeError, "DeltaRelay: no run of ids to be added to");
            Py_CLEAR(run);
        }
    }
    const int failed = run == NULL ? -1 : add_ids(run, plain);
    Py_XDECREF(run);
    return failed;
}

/* The delivery of messages to a group: a borrowed tuple, which `found` keeps; NULL: error. */
static PyObject *delivery_to(const DeltaRelay *self, PyObject *found)
{
    PyObject *delivery = *slot_of(found, in_found[DELIVERY]);
    if (delivery == NULL || delivery == Py_None) {
        delivery = PyObject_CallOneArg(self->held[DELIVERY_OF], found);
        if (delivery == NULL)
            return NULL;
        set_slot(found, in_found[DELIVERY], delivery);
    }
    if (!PyTuple_Check(delivery) || PyTuple_GET_SIZE(delivery) != DELIVERY_PARTS) {
        PyErr_SetString(PyExc_TypeError, "DeltaRelay: not a delivery");
        return NULL;
    }
    return delivery;
}

/* Add the message to the queue of its group; -1: error. */
static int add(PyObject *delivery, PyObject *texts, PyObject *batch)
{
    PyObject *numbers = PyTuple_GET_ITEM(delivery, NUMBERS_IN_GROUP), *done;
    PyObject *group = PyTuple_GET_ITEM(delivery, GROUP);
    if (group == Py_None) {
        PyObject *const args[] = {numbers, batch};
        done = PyObject_Vectorcall(PyTuple_GET_ITEM(delivery, ADD), args, 2, NULL);
    } else { /* StreamGroup.add_batch */
        PyObject *const args[] = {numbers, texts, batch};
        PyObject *items = PyObject_Vectorcall(PyTuple_GET_ITEM(delivery, ITEMS_OF), args, 3, NULL);
        PyObject *unread = items == NULL ? NULL : PyObject_GetAttr(group, unread_name);
        done = unread == NULL ? NULL : PyObject_CallMethodOneArg(unread, append_name, items);
        Py_XDECREF(unread);
        Py_XDECREF(items);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Wake what reads the group; -1: error. */
static int ring(PyObject *delivery)
{
    PyObject *group = PyTuple_GET_ITEM(delivery, GROUP), *done;
    if (group == Py_None)
        done = PyObject_CallOneArg(PyTuple_GET_ITEM(delivery, RING),
                                   PyTuple_GET_ITEM(delivery, FIRST));
    else { /* StreamGroup.ring, where no stream has ended */
        PyObject *wake = PyObject_GetAttr(group, wake_name);
        done = wake == NULL || wake == Py_None ? Py_XNewRef(wake) : PyObject_CallNoArgs(wake);
        Py_XDECREF(wake);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Add an entry to the queue of its stream, and the stream to `woken` if it is to be; -1: error. */
static int push(PyObject *state, PyObject *text, PyObject *batch, Py_ssize_t at, PyObject *woken)
{
    PyObject *entry = PyLong_FromSsize_t(at);
    PyObject *const values[] = {text, batch, entry, zero};
    PyObject *delta =
        entry == NULL ? NULL : new_instance(types[DELTA_TYPE], in_delta, values, IN_DELTA);
    PyObject *append = Py_NewRef(*slot_of(state, in_state[PUSH])); /* a reader may replace it */
    PyObject *done = delta == NULL ? NULL : PyObject_CallOneArg(append, delta);
    Py_DECREF(append);
    Py_XDECREF(entry);
    Py_XDECREF(delta);
    Py_XDECREF(done);
    if (done == NULL)
        return -1;
    const bool is_due = *slot_of(state, in_state[WAKEUP]) != Py_None &&
                        *slot_of(state, in_state[WANTS_WHOLE]) == Py_False;
    return is_due ? PyList_Append(woken, state) : 0;
}

/* Add each entry to the queue of its stream; 1 where such queues were merged; -1: error. */
static int add_each(const DeltaRelay *self, PyObject *states, PyObject *texts, PyObject *batch,
                    PyObject *woken)
{
    const Py_ssize_t num = PyList_GET_SIZE(texts);
    int has_merged = 0;
    for (Py_ssize_t at = 0; at < num && at < PyList_GET_SIZE(states); at++)
        if (push(PyList_GET_ITEM(states, at), PyList_GET_ITEM(texts, at), batch, at, woken) < 0)
            return -1;
    for (Py_ssize_t at = 0; at < num && at < PyList_GET_SIZE(states); at++) {
        PyObject *state = PyList_GET_ITEM(states, at);
        const Py_ssize_t num_unread = PyObject_Size(*slot_of(state, in_state[DELTAS]));
        if (num_unread < 0)
            return -1;
        if (num_unread <= self->most_unread || *slot_of(state, in_state[IS_OVER]) != Py_False)
            continue;
        PyObject *done = PyObject_CallOneArg(self->held[MAKE_ROOM], state);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
        has_merged = 1;
    }
    return has_merged;
}

/* Wake what reads these streams; -1: error. */
static int ring_each(PyObject *woken)
{
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(woken); at++) {
        PyObject *state = PyList_GET_ITEM(woken, at);
        PyObject *wakeup = Py_NewRef(*slot_of(state, in_state[WAKEUP]));
        PyObject *done = wakeup == Py_None ? Py_NewRef(wakeup)
                                           : PyObject_CallMethodOneArg(wakeup, ring_name, state);
        Py_DECREF(wakeup);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* Acknowledge what was received, if many messages are owed; -1: error. */
static int acknowledge(DeltaRelay *self)
{
    const Numbers *link = self->link;
    if (link->received - link->last_ack_sent <= self->may_owe)
        return 0;
    if (send_ack(self->link, self->epoch, self->held[SEND]) < 0)
        return -1;
    PyObject *is_bare = PyObject_GetAttr(self->held[CONNECTION], is_bare_name);
    self->is_spent = is_bare != Py_True;
    Py_XDECREF(is_bare);
    return is_bare == NULL ? -1 : 0;
}

/* Count the message, move its streams and keep its ids; -1: error. */
static int note(const DeltaRelay *self, PyObject *found, const Plain *plain, PyObject *handles,
                double now)
{
    PyObject *chars = ends_in_chars(plain), *tokens = ends_in_tokens(plain);
    if (chars == NULL || tokens == NULL || keep_ids(self, plain, handles) < 0) {
        Py_XDECREF(chars);
        Py_XDECREF(tokens);
        return -1;
    }
    Numbers *link = self->link;
    heard(link, (long long)plain->ack, now);
    link->received = (long long)plain->seq;
    set_slot(found, in_found[CHARS], chars);
    set_slot(found, in_found[TOKENS], tokens);
    set_slot(found, in_found[IS_AHEAD], Py_NewRef(Py_True));
    return drop_receipts(link);
}

/* Hand the message over to a group; -1: error. */
static int give_group(DeltaRelay *self, PyObject *delivery, PyObject *texts, PyObject *batch)
{
    Py_INCREF(delivery);
    const int failed =
        add(delivery, texts, batch) < 0 || acknowledge(self) < 0 || ring(delivery) < 0;
    Py_DECREF(delivery);
    return failed ? -1 : 0;
}

/* Hand each entry over to its stream; -1: error. */
static int give_each(DeltaRelay *self, PyObject *states, PyObject *texts, PyObject *batch)
{
    PyObject *woken = PyList_New(0), *done = NULL;
    const int has_merged = woken == NULL ? -1 : add_each(self, states, texts, batch, woken);
    if (has_merged >= 0 && acknowledge(self) == 0 && ring_each(woken) == 0)
        done = has_merged ? PyObject_CallNoArgs(self->held[WAKE]) : Py_NewRef(Py_None);
    Py_XDECREF(woken);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* True if these are streams, one for each entry. */
static bool are_states(PyObject *states, Py_ssize_t num)
{
    if (states == NULL || !PyList_CheckExact(states) || PyList_GET_SIZE(states) != num)
        return false;
    for (Py_ssize_t at = 0; at < num; at++)
        if (Py_TYPE(PyList_GET_ITEM(states, at)) != types[STATE_TYPE])
            return false;
    return true;
}

/* The streams of the message, with its columns as objects: those of the message before, if it has the
 * same. None where it does not continue streams; NULL: error.
 */
static PyObject *streams_of(const DeltaRelay *self, const Plain *plain, PyObject **columns)
{
    PyObject *received = self->held[RECEIVED], *found = PyObject_GetAttr(received, latest_name);
    if (found == NULL)
        return NULL;
    int num_same = 0;
    for (; Py_TYPE(found) == types[FOUND_TYPE] && num_same < 3; num_same++) {
        PyObject *column = *slot_of(found, in_found[HANDLES + num_same]);
        if (!is_column(plain->columns[num_same], column))
            break;
        columns[num_same] = Py_NewRef(column);
    }
    if (num_same == 3)
        return found;
    Py_DECREF(found);
    for (int at = num_same; at < 3; at++)
        if ((columns[at] = bytes_of(plain->columns[at])) == NULL)
            return NULL;
    PyObject *const args[] = {received, columns[0], columns[1], columns[2]};
    found = PyObject_VectorcallMethod(find_name, args, 4, NULL);
    if (found != NULL && found != Py_None && Py_TYPE(found) != types[FOUND_TYPE]) {
        PyErr_SetString(PyExc_TypeError, "DeltaRelay: no streams that are found");
        Py_CLEAR(found);
    }
    return found;
}

/* 1; 0 and no effect where the message does not continue its streams; -1: error. waiting: the messages
 * that it is the first of; NULL: none.
 */
static int deliver(DeltaRelay *self, const Plain *plain, PyObject *waiting, PyObject *now)
{
    PyObject *columns[3] = {NULL}, *states = NULL, *delivery = NULL, *deltas = NULL, *batch = NULL;
    PyObject *found = streams_of(self, plain, columns);
    int done = found == Py_None ? 0 : -1;
    if (found == NULL || found == Py_None)
        goto end;
    states = Py_XNewRef(*slot_of(found, in_found[ITEMS]));
    const bool is_each = are_states(states, plain->num);
    deltas = deltas_of(plain, columns);
    batch = deltas == NULL ? NULL : batch_of(plain, deltas, now);
    if (batch == NULL || (!is_each && (delivery = delivery_to(self, found)) == NULL) ||
        (waiting != NULL && PySequence_DelItem(waiting, 0) < 0) ||
        note(self, found, plain, *slot_of(found, in_found[HANDLES]), PyFloat_AS_DOUBLE(now)) < 0)
        goto end;
    const int failed = is_each ? give_each(self, states, plain->texts, batch)
                               : give_group(self, delivery, plain->texts, batch);
    done = failed ? -1 : 1;
end:
    for (int at = 0; at < 3; at++)
        Py_XDECREF(columns[at]);
    Py_XDECREF(found);
    Py_XDECREF(states);
    Py_XDECREF(deltas);
    Py_XDECREF(batch);
    return done;
}

/* ---- where it comes from ---------------------------------------------------------------- */

/* Read what there is: the number of bytes, 0 at the end of the connection, and -1 if there is
 * nothing now.
 */
static ssize_t receive(int fd, uint8_t *data, size_t most)
{
    ssize_t num;
    do
        num = recv(fd, data, most, MSG_DONTWAIT);
    while (num < 0 && errno == EINTR);
    if (num < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        return 0; /* a connection that failed has ended, too */
    return num;
}

static bool is_one_message(const uint8_t *data, ssize_t num)
{
    if (num < PREFIX_BYTES)
        return false;
    const uint32_t length = (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                            (uint32_t)data[3] << 24;
    return (ssize_t)length == num - PREFIX_BYTES;
}

/* Leave to the connection what was read. 1 if whole messages have arrived; -1: error. */
static int leave(const DeltaRelay *self, const uint8_t *data, ssize_t num)
{
    PyObject *given = PyBytes_FromStringAndSize((const char *)data, num);
    if (given == NULL)
        return -1;
    PyObject *are_whole = PyObject_CallOneArg(self->held[TAKE_IN], given);
    Py_DECREF(given);
    const int found = are_whole == NULL ? -1 : PyObject_IsTrue(are_whole);
    Py_XDECREF(are_whole);
    return found;
}

/* Take the message, if it is plain: 1; -1: error. waiting: see `deliver`. */
static int take_message(DeltaRelay *self, const uint8_t *data, size_t num_bytes, PyObject *waiting,
                        PyObject *now)
{
    Plain plain = {0};
    if (!read_plain(self->link, self->epoch, data, num_bytes, &plain))
        return 0;
    const int done = deliver(self, &plain, waiting, now);
    Py_DECREF(plain.texts);
    return done;
}

/* Take the only message that the connection has, likewise. */
static int take_kept(DeltaRelay *self, PyObject *now)
{
    PyObject *messages = self->held[MESSAGES];
    const Py_ssize_t num = PySequence_Size(messages);
    if (num != 1)
        return num < 0 ? -1 : 0;
    PyObject *message = PySequence_GetItem(messages, 0);
    int done = message == NULL ? -1 : 0;
    if (message != NULL && PyBytes_CheckExact(message))
        done = take_message(self, (const uint8_t *)PyBytes_AS_STRING(message),
                            (size_t)PyBytes_GET_SIZE(message), messages, now);
    Py_XDECREF(message);
    return done;
}

/* Take the only message that has arrived, likewise. */
static int take_only(DeltaRelay *self, PyObject *now)
{
    uint8_t data[CHUNK_BYTES];
    if (!self->is_socket)
        return take_kept(self, now);
    const ssize_t num = receive((int)self->fd, data, sizeof data);
    if (num < 0)
        return 0;
    const bool is_one = is_one_message(data, num);
    if (is_one) {
        const int done = take_message(self, data + PREFIX_BYTES, (size_t)(num - PREFIX_BYTES), NULL,
                                      now);
        if (done)
            return done;
    }
    const int are_whole = leave(self, data, num);
    return are_whole <= 0 || is_one ? (are_whole < 0 ? -1 : 0) : take_kept(self, now);
}

/* True if the link has ended, or something else is to be done first; -1: error. */
static int is_anything_due(const DeltaRelay *self)
{
    PyObject *watched = self->held[WATCHED];
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(watched); at++) {
        const Py_ssize_t num = PyObject_Size(PyTuple_GET_ITEM(watched, at));
        if (num)
            return num < 0 ? -1 : 1;
    }
    const long fd = fd_of(self->held[CONNECTION]);
    if (fd == -1 && PyErr_Occurred())
        return -1;
    return self->is_spent || fd != self->fd || fd < 0;
}

/* take(now) -> whether a message was taken */
static PyObject *take(PyObject *object, PyObject *now)
{
    DeltaRelay *self = (DeltaRelay *)object;
    if (!PyFloat_Check(now)) {
        PyErr_SetString(PyExc_TypeError, "take: expected a float");
        return NULL;
    }
    const int is_due = is_anything_due(self);
    const int done = is_due ? -(is_due < 0) : take_only(self, now);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* ---- the module ------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"take", take, METH_O, "Take the message that has arrived."},
    {0},
};

static PyMemberDef members[] = {
    {"link", T_OBJECT_EX, offsetof(DeltaRelay, link), READONLY, NULL},
    {"is_spent", T_BOOL, offsetof(DeltaRelay, is_spent), READONLY, NULL},
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

static PyType_Spec spec = {"slipstream._native.DeltaRelay", sizeof(DeltaRelay), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

/* prepare(types, ends): the types of what it works on and makes (LinkNumbers, LogprobColumns,
 * MessageStreams, StreamState, Delta, Deltas and DeltaBatch), and the ends of a message without any.
 * Raises TypeError or AttributeError where their instances have other fields.
 */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given[NUM_TYPES], *ends;
    if (!PyArg_ParseTuple(args, "(O!O!O!O!O!O!O!)O", &PyType_Type, &given[0], &PyType_Type,
                          &given[1], &PyType_Type, &given[2], &PyType_Type, &given[3], &PyType_Type,
                          &given[4], &PyType_Type, &given[5], &PyType_Type, &given[6], &ends))
        return NULL;
    static const struct {
        int type, num;
        const char *const *names;
        Py_ssize_t *offsets;
    } fields[] = {{FOUND_TYPE, IN_FOUND, found_fields, in_found},
                  {STATE_TYPE, IN_STATE, state_fields, in_state},
                  {DELTA_TYPE, IN_DELTA, delta_fields, in_delta},
                  {DELTAS_TYPE, IN_DELTAS, deltas_fields, in_deltas},
                  {BATCH_TYPE, IN_BATCH, batch_fields, in_batch}};
    if (!consists_of((PyTypeObject *)given[DELTA_TYPE], IN_DELTA) ||
        !consists_of((PyTypeObject *)given[DELTAS_TYPE], IN_DELTAS)) {
        PyErr_SetString(PyExc_TypeError, "instances have more than their fields");
        return NULL;
    }
    const int num_fields = (int)(sizeof fields / sizeof *fields);
    Py_ssize_t tried[IN_DELTAS]; /* the most that one has; offsets are set where all can be */
    for (int at = 0; at < 2 * num_fields; at++) {
        const int of = at % num_fields;
        if (find_offsets((PyTypeObject *)given[fields[of].type], fields[of].names, fields[of].num,
                         at < num_fields ? tried : fields[of].offsets) < 0)
            return NULL;
    }
    for (int at = 0; at < NUM_TYPES; at++)
        Py_XSETREF(types[at], (PyTypeObject *)Py_NewRef(given[at]));
    Py_XSETREF(no_ends, Py_NewRef(ends));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare_delta_relay", prepare, METH_VARARGS, NULL},
    {0},
};

int add_delta_relay(PyObject *module)
{
    fd_name = PyUnicode_InternFromString("fd");
    latest_name = PyUnicode_InternFromString("latest");
    run_name = PyUnicode_InternFromString("run");
    begin_run_name = PyUnicode_InternFromString("begin_run");
    is_bare_name = PyUnicode_InternFromString("is_bare");
    unread_name = PyUnicode_InternFromString("unread");
    wake_name = PyUnicode_InternFromString("wake");
    append_name = PyUnicode_InternFromString("append");
    ring_name = PyUnicode_InternFromString("ring");
    find_name = PyUnicode_InternFromString("find");
    zero = PyLong_FromLong(0);
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    no_tuple = PyTuple_New(0);
    if (!fd_name || !latest_name || !run_name || !begin_run_name || !is_bare_name || !unread_name ||
        !wake_name || !append_name || !ring_name || !find_name || !zero || !no_bytes || !no_tuple)
        return -1;
    if (add_type(module, &spec) == NULL)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
