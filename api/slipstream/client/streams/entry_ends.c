/* ends_of(chars, tokens, texts, counts): see entry_ends.py, where the same is in Python. */
#include "module.h"

#include <stdint.h>
#include <string.h>

static PyObject *ends(const Py_buffer *columns, PyObject *texts) {
    Py_ssize_t num = PyList_GET_SIZE(texts);
    if (columns[0].len != 4 * num || columns[1].len != 4 * num ||
        (columns[2].len && columns[2].len != 4 * num)) {
        PyErr_SetString(PyExc_ValueError, "ends_of: columns of different lengths");
        return NULL;
    }
    PyObject *chars = PyBytes_FromStringAndSize(NULL, 4 * num);
    PyObject *tokens = PyBytes_FromStringAndSize(NULL, 4 * num);
    PyObject *found = NULL;
    if (!chars || !tokens)
        goto done;
    for (Py_ssize_t at = 0; at < num; at++) {
        PyObject *text = PyList_GET_ITEM(texts, at);
        if (!PyUnicode_Check(text)) {
            PyErr_SetString(PyExc_TypeError, "ends_of: expected a list of str");
            goto done;
        }
        uint32_t char_at, token_at, count = 1; /* columns need not be aligned */
        memcpy(&char_at, (const char *)columns[0].buf + 4 * at, 4);
        memcpy(&token_at, (const char *)columns[1].buf + 4 * at, 4);
        if (columns[2].len)
            memcpy(&count, (const char *)columns[2].buf + 4 * at, 4);
        char_at += (uint32_t)PyUnicode_GET_LENGTH(text);
        token_at += count;
        memcpy(PyBytes_AS_STRING(chars) + 4 * at, &char_at, 4);
        memcpy(PyBytes_AS_STRING(tokens) + 4 * at, &token_at, 4);
    }
    found = PyTuple_Pack(2, chars, tokens);
done:
    Py_XDECREF(chars);
    Py_XDECREF(tokens);
    return found;
}

static PyObject *ends_of(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 4 || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "ends_of: expected three columns and a list");
        return NULL;
    }
    PyObject *const given[] = {args[0], args[1], args[3]};
    Py_buffer columns[3];
    int num = 0;
    PyObject *found = NULL;
    for (; num < 3; num++)
        if (PyObject_GetBuffer(given[num], &columns[num], PyBUF_SIMPLE) < 0)
            break;
    if (num == 3)
        found = ends(columns, args[2]);
    while (num)
        PyBuffer_Release(&columns[--num]);
    return found;
}

static PyMethodDef methods[] = {
    {"ends_of", (PyCFunction)(void (*)(void))ends_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_entry_ends(PyObject *module) { return PyModule_AddFunctions(module, methods); }
