/* The counts of a streak where other modules of C reach them. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#include "streak.h"

static PyObject *new_counts(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args, (void)keywords; /* those of a subclass's `__init__` */
    StreakCounts *self = (StreakCounts *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->num_sent = 1;
    self->is_on = self->is_written = self->is_acked_written = 1;
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"num_sent", T_LONGLONG, offsetof(StreakCounts, num_sent), 0, NULL},
    {"num_acked", T_LONGLONG, offsetof(StreakCounts, num_acked), 0, NULL},
    {"is_on", T_BOOL, offsetof(StreakCounts, is_on), 0, NULL},
    {"is_written", T_BOOL, offsetof(StreakCounts, is_written), 0, NULL},
    {"is_acked_written", T_BOOL, offsetof(StreakCounts, is_acked_written), 0, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_counts},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "slipstream_ipc._native.StreakCounts", sizeof(StreakCounts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

int add_streak(PyObject *module) { return add_type(module, &spec) == NULL ? -1 : 0; }
