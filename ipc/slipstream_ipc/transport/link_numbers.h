/* The numbers of one end of a link, and counting them; see link_numbers.py. */
#ifndef SLIPSTREAM_LINK_NUMBERS_H
#define SLIPSTREAM_LINK_NUMBERS_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    PyObject *epoch;
    PyObject *receipts; /* a list: of frames acked + 1 .. sent, and untaken ones */
    long long window, sent, acked, received, last_ack_sent, num_heard;
    double heard_at;
} Numbers;

static inline void heard(Numbers *self, long long ack, double now)
{
    self->heard_at = now;
    self->num_heard++;
    if (ack > self->acked)
        self->acked = ack;
}

/* A numbered frame has left; -1: error. */
static inline int count_sent(Numbers *self, PyObject *receipt)
{
    if (PyList_Append(self->receipts, receipt) < 0)
        return -1;
    self->sent++;
    self->last_ack_sent = self->received;
    return 0;
}

/* True if the receipts of frames up to `acked` that are not taken yet are all without content:
 * None, or an empty list.
 */
static inline int are_idle(const Numbers *self, long long acked)
{
    const Py_ssize_t due = PyList_GET_SIZE(self->receipts) - (Py_ssize_t)(self->sent - acked);
    for (Py_ssize_t at = 0; at < due; at++) {
        PyObject *receipt = PyList_GET_ITEM(self->receipts, at);
        if (receipt != Py_None && !(PyList_Check(receipt) && PyList_GET_SIZE(receipt) == 0))
            return 0;
    }
    return 1;
}

/* Drop the receipts of acknowledged frames; -1: error. */
static inline int drop_receipts(Numbers *self)
{
    const Py_ssize_t due = PyList_GET_SIZE(self->receipts) - (Py_ssize_t)(self->sent - self->acked);
    return due > 0 ? PyList_SetSlice(self->receipts, 0, due, NULL) : 0;
}

#endif
