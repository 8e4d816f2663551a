/* SocketWriter(fd, unsent, write): a connection's `write` that sends at once what its socket takes.
 *
 * While the transport holds no bytes, they go to the socket directly, without blocking; the rest, and
 * every failure, is left to `write`, which is the transport's. From then on, and after `wait`, which
 * says that the transport was written to otherwise, bytes are the transport's until `unsent()` is 0.
 * After `detach` all are: the socket may be closed and its number reused.
 */
#include "module.h"

#include <errno.h>
#include <structmember.h>
#include <sys/socket.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *unsent, *write;
    int fd;       /* -1: detached */
    char waits; /* the transport may hold bytes */
} SocketWriter;

static PyObject *call(PyObject *self, PyObject *const *args, size_t num_args, PyObject *names) {
    SocketWriter *writer = (SocketWriter *)self;
    if (PyVectorcall_NARGS(num_args) != 1 || names || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected bytes");
        return NULL;
    }
    if (!writer->write) {
        PyErr_SetString(PyExc_RuntimeError, "a writer that was garbage collected");
        return NULL;
    }
    if (writer->fd < 0)
        return PyObject_CallOneArg(writer->write, args[0]);
    if (writer->waits) {
        PyObject *unsent = PyObject_CallNoArgs(writer->unsent);
        if (!unsent)
            return NULL;
        int has_unsent = PyObject_IsTrue(unsent);
        Py_DECREF(unsent);
        if (has_unsent)
            return has_unsent < 0 ? NULL : PyObject_CallOneArg(writer->write, args[0]);
        writer->waits = 0;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]), sent;
    do
        sent = send(writer->fd, PyBytes_AS_STRING(args[0]), (size_t)size,
                    MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent == size)
        Py_RETURN_NONE;
    writer->waits = 1;
    if (sent <= 0)
        return PyObject_CallOneArg(writer->write, args[0]);
    PyObject *rest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(args[0]) + sent, size - sent);
    if (!rest)
        return NULL;
    PyObject *result = PyObject_CallOneArg(writer->write, rest);
    Py_DECREF(rest);
    return result;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *names) {
    static char *keywords[] = {"fd", "unsent", "write", NULL};
    int fd;
    PyObject *unsent, *write;
    if (!PyArg_ParseTupleAndKeywords(args, names, "iOO", keywords, &fd, &unsent, &write))
        return NULL;
    SocketWriter *writer = (SocketWriter *)type->tp_alloc(type, 0);
    if (!writer)
        return NULL;
    writer->vectorcall = call;
    writer->fd = fd;
    writer->waits = 1;
    writer->unsent = Py_NewRef(unsent);
    writer->write = Py_NewRef(write);
    return (PyObject *)writer;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((SocketWriter *)self)->unsent);
    Py_VISIT(((SocketWriter *)self)->write);
    return 0;
}

static int clear(PyObject *self) {
    Py_CLEAR(((SocketWriter *)self)->unsent);
    Py_CLEAR(((SocketWriter *)self)->write);
    return 0;
}

static PyObject *detach(PyObject *self, PyObject *args) {
    (void)args;
    ((SocketWriter *)self)->fd = -1;
    Py_RETURN_NONE;
}

static PyObject *wait_for_transport(PyObject *self, PyObject *args) {
    (void)args;
    ((SocketWriter *)self)->waits = 1;
    Py_RETURN_NONE;
}

static void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"wait", wait_for_transport, METH_NOARGS, "Bytes were written to the transport otherwise."},
    {"detach", detach, METH_NOARGS, "Leave the socket alone from now on."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "slipstream._native.SocketWriter",
    .tp_basicsize = sizeof(SocketWriter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(SocketWriter, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = new,
    .tp_methods = methods,
    .tp_traverse = traverse,
    .tp_clear = clear,
    .tp_dealloc = dealloc,
};

int add_socket_writer(PyObject *module) { return PyModule_AddType(module, &type); }
