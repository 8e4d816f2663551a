/* A package's one module in C, of parts that add what they have. */
#ifndef SLIPSTREAM_MODULE_H
#define SLIPSTREAM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef int (*AddPart)(PyObject *module); /* -1: error */

/* Add a type, and keep a reference for as long as the process runs; NULL: error. */
static inline PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

/* A type of another module, for as long as the process runs; NULL: error. */
static inline PyTypeObject *type_of(const char *module, const char *name)
{
    PyObject *owner = PyImport_ImportModule(module);
    PyObject *type = owner == NULL ? NULL : PyObject_GetAttrString(owner, name);
    Py_XDECREF(owner);
    if (type != NULL && !PyType_Check(type)) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no type", module, name);
        Py_CLEAR(type);
    }
    return (PyTypeObject *)type;
}

static inline PyObject *module_of(PyModuleDef *definition, const AddPart *parts, int num)
{
    PyObject *module = PyModule_Create(definition);
    for (int at = 0; at < num && module != NULL; at++)
        if (parts[at](module) < 0)
            Py_CLEAR(module);
    return module;
}

#endif
