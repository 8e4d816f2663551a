/* Sends and receives the messages of a local connection: see `_native.pyi`.
 *
 * Neither call blocks, so neither gives up the interpreter's lock: taking it back may take longer
 * than the call itself where another thread is busy.
 */
#include "module.h"

#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define PREFIX_BYTES 4 /* a message's length, u32 little-endian, as in local_socket.py */
#define CHUNK_BYTES (1 << 14)

static uint32_t length_at(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The descriptor; one that cannot be is -1, of which the kernel says that it is none. */
static int as_fd(PyObject *given)
{
    const long fd = PyLong_AsLong(given);
    return fd < 0 || fd > INT32_MAX ? -1 : (int)fd;
}

/* send_message(fd, message) -> how many bytes of its length and of itself the kernel took */
static PyObject *send_message(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 2 || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "send_message: expected a descriptor and bytes");
        return NULL;
    }
    const int fd = as_fd(args[0]);
    const Py_ssize_t num = PyBytes_GET_SIZE(args[1]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (num > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "send_message: a message of 4 GiB or more");
        return NULL;
    }
    unsigned char prefix[PREFIX_BYTES];
    for (int at = 0; at < PREFIX_BYTES; at++)
        prefix[at] = (unsigned char)(num >> 8 * at);
    struct iovec parts[2] = {{prefix, PREFIX_BYTES}, {PyBytes_AS_STRING(args[1]), (size_t)num}};
    struct msghdr header = {0};
    header.msg_iov = parts;
    header.msg_iovlen = 2;
    ssize_t sent;
    do
        /* with the interpreter's lock: else a busy reader holds up its I/O thread (decision 010) */
        sent = sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return PyErr_SetFromErrno(PyExc_OSError);
        sent = 0;
    }
    return PyLong_FromSsize_t(sent);
}

/* read_messages(fd, append, max_bytes) -> what follows the last whole message; None at the end
 *
 * Reads what has arrived, at most CHUNK_BYTES, and calls `append` with each whole message before
 * one of more than max_bytes.
 */
static PyObject *read_messages(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    unsigned char data[CHUNK_BYTES];
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "read_messages: expected 3 arguments");
        return NULL;
    }
    const int fd = as_fd(args[0]);
    const Py_ssize_t max_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    ssize_t num;
    do
        num = recv(fd, data, sizeof data, MSG_DONTWAIT);
    while (num < 0 && errno == EINTR);
    if (num < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return PyBytes_FromStringAndSize(NULL, 0);
    if (num <= 0)
        Py_RETURN_NONE; /* a connection that failed has ended, too */
    ssize_t begin = 0;
    while (num - begin >= PREFIX_BYTES) {
        const uint32_t length = length_at(data + begin);
        if ((Py_ssize_t)length > num - begin - PREFIX_BYTES || (Py_ssize_t)length > max_bytes)
            break;
        PyObject *message =
            PyBytes_FromStringAndSize((const char *)data + begin + PREFIX_BYTES, length);
        if (message == NULL)
            return NULL;
        PyObject *done = PyObject_CallOneArg(args[1], message);
        Py_DECREF(message);
        if (done == NULL)
            return NULL;
        Py_DECREF(done);
        begin += PREFIX_BYTES + (ssize_t)length;
    }
    return PyBytes_FromStringAndSize((const char *)data + begin, num - begin);
}

static PyMethodDef functions[] = {
    {"send_message", (PyCFunction)(void (*)(void))send_message, METH_FASTCALL, "Send a message."},
    {"read_messages", (PyCFunction)(void (*)(void))read_messages, METH_FASTCALL, "Read messages."},
    {0},
};

int add_local_io(PyObject *module) { return PyModule_AddFunctions(module, functions); }
