/* The positions of a streak that were sent and acknowledged; see streak.py. */
#ifndef SLIPSTREAM_STREAK_H
#define SLIPSTREAM_STREAK_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    long long num_sent, num_acked;
    char is_on, is_written, is_acked_written;
} StreakCounts;

#endif
