/* The numbers of one end of a link: see `_native.pyi` for the meaning of each. */
#include "module.h"

#include <limits.h>
#include <stddef.h>
#include <structmember.h>

#include "link_numbers.h"
#include "msgpack.h"

static PyObject *frame_type, *unnumbered; /* see `prepare` */
static PyObject *deliver, *ignore, *gap;
static PyObject *epoch_name, *seq_name, *ack_name, *body_name;

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Numbers *self = (Numbers *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->epoch);
    Py_VISIT(self->receipts);
    return 0;
}

static int clear(PyObject *object)
{
    Numbers *self = (Numbers *)object;
    Py_CLEAR(self->epoch);
    Py_CLEAR(self->receipts);
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

/* Without `init` it is whole, too: of epoch 0, and without credit. */
static PyObject *new_numbers(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args, (void)keywords;
    Numbers *self = (Numbers *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->epoch = PyLong_FromLong(0);
    self->receipts = PyList_New(0);
    if (self->epoch == NULL || self->receipts == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* LinkNumbers(epoch, now, window) */
static int init(PyObject *object, PyObject *args, PyObject *keywords)
{
    Numbers *self = (Numbers *)object;
    PyObject *epoch;
    double now;
    long long window;
    if (frame_type == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "LinkNumbers: `prepare` comes first");
        return -1;
    }
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "LinkNumbers: no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!dL", &PyLong_Type, &epoch, &now, &window))
        return -1;
    PyObject *receipts = PyList_New(0);
    if (receipts == NULL)
        return -1;
    Py_INCREF(epoch);
    Py_XSETREF(self->epoch, epoch);
    Py_XSETREF(self->receipts, receipts);
    self->window = window, self->heard_at = now;
    self->sent = self->acked = self->received = self->last_ack_sent = self->num_heard = 0;
    return 0;
}

/* A frame with this link's epoch. */
static PyObject *new_frame(const Numbers *self, long long seq, PyObject *body)
{
    PyObject *numbers[2] = {PyLong_FromLongLong(seq), PyLong_FromLongLong(self->received)};
    PyObject *frame = NULL;
    if (numbers[0] != NULL && numbers[1] != NULL) {
        PyObject *const args[] = {self->epoch, numbers[0], numbers[1], body};
        frame = PyObject_Vectorcall(frame_type, args, 4, NULL);
    }
    Py_XDECREF(numbers[0]);
    Py_XDECREF(numbers[1]);
    return frame;
}

/* A number of a frame, at most LLONG_MAX and at least LLONG_MIN; -1 with an error set on failure. */
static long long number_of(PyObject *frame, PyObject *name)
{
    PyObject *given = PyObject_GetAttr(frame, name);
    if (given == NULL)
        return -1;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    Py_DECREF(given);
    return overflow ? (overflow > 0 ? LLONG_MAX : LLONG_MIN) : number;
}

/* True if the frame belongs to this link and acknowledges nothing that was not sent; -1: error. */
static int belongs(const Numbers *self, PyObject *frame, long long *seq, long long *ack)
{
    PyObject *epoch = PyObject_GetAttr(frame, epoch_name);
    if (epoch == NULL)
        return -1;
    const int is_same = PyObject_RichCompareBool(epoch, self->epoch, Py_EQ);
    Py_DECREF(epoch);
    if (is_same <= 0)
        return is_same;
    *seq = number_of(frame, seq_name);
    if (*seq == -1 && PyErr_Occurred())
        return -1;
    *ack = number_of(frame, ack_name);
    if (*ack == -1 && PyErr_Occurred())
        return -1;
    return *ack <= self->sent;
}

static PyObject *numbered(PyObject *object, PyObject *body)
{
    const Numbers *self = (Numbers *)object;
    return new_frame(self, self->sent + 1, body);
}

static PyObject *control(PyObject *object, PyObject *body)
{
    const Numbers *self = (Numbers *)object;
    return new_frame(self, self->sent, body);
}

static PyObject *sent(PyObject *object, PyObject *receipt)
{
    if (count_sent((Numbers *)object, receipt) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *ack_sent(PyObject *object, PyObject *unused)
{
    (void)unused;
    Numbers *self = (Numbers *)object;
    self->last_ack_sent = self->received;
    Py_RETURN_NONE;
}

/* True if `write` takes the frame's bytes; -1: error. */
static int pass_frame(PyObject *frame, PyObject *encode, PyObject *write)
{
    if (frame == NULL)
        return -1;
    PyObject *data = PyObject_CallOneArg(encode, frame);
    Py_DECREF(frame);
    if (data == NULL)
        return -1;
    PyObject *taken = PyObject_CallOneArg(write, data);
    Py_DECREF(data);
    if (taken == NULL)
        return -1;
    const int is_taken = PyObject_IsTrue(taken);
    Py_DECREF(taken);
    return is_taken;
}

static PyObject *send(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Numbers *self = (Numbers *)object;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "send: expected 4 arguments");
        return NULL;
    }
    if (self->sent - self->acked >= self->window)
        Py_RETURN_FALSE;
    const int is_taken = pass_frame(new_frame(self, self->sent + 1, args[0]), args[2], args[3]);
    if (is_taken < 0)
        return NULL;
    if (is_taken && count_sent(self, args[1]) < 0)
        return NULL;
    return PyBool_FromLong(is_taken);
}

static PyObject *send_control(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Numbers *self = (Numbers *)object;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "send_control: expected 3 arguments");
        return NULL;
    }
    const int is_taken = pass_frame(new_frame(self, self->sent, args[0]), args[1], args[2]);
    if (is_taken < 0)
        return NULL;
    if (is_taken)
        self->last_ack_sent = self->received;
    return PyBool_FromLong(is_taken);
}

static PyObject *receive(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Numbers *self = (Numbers *)object;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "receive: expected 3 arguments");
        return NULL;
    }
    long long seq, ack;
    const int is_numbered = PyObject_IsTrue(args[1]);
    const double now = is_numbered < 0 ? -1.0 : PyFloat_AsDouble(args[2]);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    const int is_ours = belongs(self, args[0], &seq, &ack);
    if (is_ours < 0)
        return NULL;
    if (!is_ours)
        return Py_NewRef(ignore);
    heard(self, ack, now);
    if (!is_numbered)
        return Py_NewRef(seq <= self->received ? deliver : gap);
    if (seq <= self->received)
        return Py_NewRef(ignore);
    if (seq - 1 > self->received)
        return Py_NewRef(gap);
    self->received = seq;
    return Py_NewRef(deliver);
}

static PyObject *take_next(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Numbers *self = (Numbers *)object;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "take_next: expected 2 arguments");
        return NULL;
    }
    PyObject *body = PyObject_GetAttr(args[0], body_name);
    if (body == NULL)
        return NULL;
    long long seq, ack;
    const double now = PyFloat_AsDouble(args[1]);
    int is_next = now == -1.0 && PyErr_Occurred() ? -1 : 1;
    if (is_next > 0) {
        const int is_control = PySet_Contains(unnumbered, (PyObject *)Py_TYPE(body));
        is_next = is_control < 0 ? -1 : !is_control;
    }
    if (is_next > 0)
        is_next = belongs(self, args[0], &seq, &ack);
    if (is_next <= 0 || seq != self->received + 1) {
        Py_DECREF(body);
        return is_next < 0 ? NULL : Py_NewRef(Py_None);
    }
    heard(self, ack, now);
    self->received = seq;
    return body;
}

static PyObject *take_ack(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Numbers *self = (Numbers *)object;
    if (num_args != 2 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "take_ack: expected bytes and a number");
        return NULL;
    }
    const double now = PyFloat_AsDouble(args[1]);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    Reader reader = {data, data + PyBytes_GET_SIZE(args[0]), false};
    expect(&reader, 0x94);
    const uint64_t epoch = read_number(&reader), seq = read_number(&reader);
    const uint64_t ack = read_number(&reader);
    expect(&reader, 0xc0);
    if (reader.has_failed || reader.at != reader.end || seq > (uint64_t)self->received ||
        ack > (uint64_t)self->sent)
        Py_RETURN_FALSE;
    const unsigned long long own = PyLong_AsUnsignedLongLong(self->epoch);
    if (PyErr_Occurred()) { /* an epoch that no frame has */
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (own != epoch)
        Py_RETURN_FALSE;
    heard(self, (long long)ack, now);
    Py_RETURN_TRUE;
}

static PyObject *take_receipts(PyObject *object, PyObject *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    const Py_ssize_t due = PyList_GET_SIZE(self->receipts) - (self->sent - self->acked);
    if (due <= 0)
        return PyList_New(0);
    PyObject *taken = PyList_GetSlice(self->receipts, 0, due);
    if (taken != NULL && PyList_SetSlice(self->receipts, 0, due, NULL) < 0)
        Py_CLEAR(taken);
    return taken;
}

static PyObject *end(PyObject *object, PyObject *unused)
{
    (void)unused;
    Numbers *self = (Numbers *)object;
    const Py_ssize_t num = PyList_GET_SIZE(self->receipts);
    const Py_ssize_t kept = num - (self->sent - self->acked);
    if (kept < num && PyList_SetSlice(self->receipts, kept > 0 ? kept : 0, num, NULL) < 0)
        return NULL;
    self->sent = self->acked;
    Py_RETURN_NONE;
}

static PyObject *has_credit(PyObject *object, void *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    return PyBool_FromLong(self->sent - self->acked < self->window);
}

static PyObject *num_unacked(PyObject *object, void *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    return PyLong_FromLongLong(self->sent - self->acked);
}

static PyObject *has_receipts(PyObject *object, void *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    return PyBool_FromLong(PyList_GET_SIZE(self->receipts) > self->sent - self->acked);
}

static PyObject *owes_ack(PyObject *object, void *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    return PyBool_FromLong(self->last_ack_sent < self->received);
}

static PyObject *num_owed_acks(PyObject *object, void *unused)
{
    (void)unused;
    const Numbers *self = (Numbers *)object;
    return PyLong_FromLongLong(self->received - self->last_ack_sent);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    {"numbered", numbered, METH_O, NULL},
    {"control", control, METH_O, NULL},
    {"sent", sent, METH_O, NULL},
    {"ack_sent", ack_sent, METH_NOARGS, NULL},
    FAST(send),
    FAST(send_control),
    FAST(receive),
    FAST(take_next),
    FAST(take_ack),
    {"take_receipts", take_receipts, METH_NOARGS, NULL},
    {"end", end, METH_NOARGS, NULL},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    {0},
};

static PyGetSetDef properties[] = {
    {"has_credit", has_credit, NULL, NULL, NULL},
    {"num_unacked", num_unacked, NULL, NULL, NULL},
    {"has_receipts", has_receipts, NULL, NULL, NULL},
    {"owes_ack", owes_ack, NULL, NULL, NULL},
    {"num_owed_acks", num_owed_acks, NULL, NULL, NULL},
    {0},
};

static PyMemberDef members[] = {
    {"epoch", T_OBJECT_EX, offsetof(Numbers, epoch), READONLY, NULL},
    {"heard_at", T_DOUBLE, offsetof(Numbers, heard_at), READONLY, NULL},
    {"num_heard", T_LONGLONG, offsetof(Numbers, num_heard), READONLY, NULL},
    {"num_acked", T_LONGLONG, offsetof(Numbers, acked), READONLY, NULL},
    {"window", T_LONGLONG, offsetof(Numbers, window), 0, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_numbers},
    {Py_tp_init, init},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "slipstream_ipc._native.LinkNumbers", sizeof(Numbers), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

/* prepare(Frame, unnumbered, (deliver, ignore, gap)): what the numbers are of, and the verdicts */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *frame, *types, *verdicts[3];
    if (!PyArg_ParseTuple(args, "OO!(OOO)", &frame, &PyFrozenSet_Type, &types, &verdicts[0],
                          &verdicts[1], &verdicts[2]))
        return NULL;
    Py_XSETREF(frame_type, Py_NewRef(frame));
    Py_XSETREF(unnumbered, Py_NewRef(types));
    Py_XSETREF(deliver, Py_NewRef(verdicts[0]));
    Py_XSETREF(ignore, Py_NewRef(verdicts[1]));
    Py_XSETREF(gap, Py_NewRef(verdicts[2]));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare_link_numbers", prepare, METH_VARARGS, NULL},
    {0},
};

int add_link_numbers(PyObject *module)
{
    epoch_name = PyUnicode_InternFromString("epoch");
    seq_name = PyUnicode_InternFromString("seq");
    ack_name = PyUnicode_InternFromString("ack");
    body_name = PyUnicode_InternFromString("body");
    if (epoch_name == NULL || seq_name == NULL || ack_name == NULL || body_name == NULL)
        return -1;
    if (add_type(module, &spec) == NULL)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
