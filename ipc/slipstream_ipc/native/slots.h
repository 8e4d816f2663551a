/* The fields of instances: slots of a class, or fields of a msgspec Struct, by their offsets.
 *
 * Both keep a field as a member descriptor, which tells where in an instance it is.
 */
#ifndef SLIPSTREAM_SLOTS_H
#define SLIPSTREAM_SLOTS_H

#include <Python.h>
#include <structmember.h>

/* The place of a field in the instances; -1 with an error set if it is none. */
static inline Py_ssize_t offset_of(PyTypeObject *owner, const char *name)
{
    PyObject *member = PyObject_GetAttrString((PyObject *)owner, name);
    if (member == NULL)
        return -1;
    Py_ssize_t offset = -1;
    if (Py_TYPE(member) == &PyMemberDescr_Type) {
        PyMemberDef *field = ((PyMemberDescrObject *)member)->d_member;
        if (field->type == T_OBJECT_EX || field->type == T_OBJECT)
            offset = field->offset;
    }
    if (offset < 0)
        PyErr_Format(PyExc_TypeError, "%s is not a field of the instances", name);
    Py_DECREF(member);
    return offset;
}

/* The places of several fields; -1: error. */
static inline int find_offsets(PyTypeObject *owner, const char *const *names, int num,
                               Py_ssize_t *offsets)
{
    for (int at = 0; at < num; at++)
        if ((offsets[at] = offset_of(owner, names[at])) < 0)
            return -1;
    return 0;
}

/* True if instances consist of so many fields, and are no containers to the garbage collector. */
static inline int consists_of(PyTypeObject *type, int num)
{
    return type->tp_basicsize == (Py_ssize_t)(sizeof(PyObject) + num * sizeof(PyObject *)) &&
           !type->tp_itemsize && !PyType_IS_GC(type) && !type->tp_dictoffset &&
           !type->tp_weaklistoffset;
}

static inline PyObject **slot_of(PyObject *instance, Py_ssize_t offset)
{
    return (PyObject **)((char *)instance + offset);
}

/* Set a field, which takes over the reference to its value. */
static inline void set_slot(PyObject *instance, Py_ssize_t offset, PyObject *value)
{
    PyObject **slot = slot_of(instance, offset), *before = *slot;
    *slot = value;
    Py_XDECREF(before);
}

/* An instance with these fields; NULL: error. */
static inline PyObject *new_instance(PyTypeObject *type, const Py_ssize_t *offsets,
                                     PyObject *const *values, int num)
{
    PyObject *instance = type->tp_alloc(type, 0);
    for (int at = 0; at < num && instance != NULL; at++)
        *slot_of(instance, offsets[at]) = Py_NewRef(values[at]);
    return instance;
}

#endif
