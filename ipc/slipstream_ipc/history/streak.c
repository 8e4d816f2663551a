/* The counts of a streak where other extensions reach them: `streak.py` is the reference. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
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
    "streak.StreakCounts", sizeof(StreakCounts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "streak", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_streak(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(module, "StreakCounts", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
