/* The loops over the table of PrefixMemory.
 *
 * The same as ReferenceTable in prefix_memory.py, which says what each function does; a test holds
 * the two together. The table's buffers are checked against each other on each call.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

enum { SET_SIZE = 8 };

typedef struct {
    Py_buffer views[3]; /* tags, times, chain */
    int num_views;
    uint64_t *tags;
    double *times;
    const uint64_t *chain;
    Py_ssize_t num_sets, num_hashes;
} Table;

static uint64_t mix64(uint64_t value)
{
    value += UINT64_C(0x9E3779B97F4A7C15);
    value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
    return value ^ (value >> 31);
}

static void release(Table *table)
{
    while (table->num_views > 0)
        PyBuffer_Release(&table->views[--table->num_views]);
}

/* Take the table and the chain; -1 with an exception if they do not fit together. */
static int take(Table *table, PyObject *const *args)
{
    table->num_views = 0;
    for (int i = 0; i < 3; i++) {
        Py_buffer *view = &table->views[i];
        if (PyObject_GetBuffer(args[i], view, i < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
        table->num_views++;
        if (view->len % 8 != 0 || (uintptr_t)view->buf % 8 != 0) {
            PyErr_SetString(PyExc_ValueError, "a buffer of the table has no items of 8 bytes");
            return -1;
        }
    }
    table->tags = table->views[0].buf;
    table->times = table->views[1].buf;
    table->chain = table->views[2].buf;
    table->num_hashes = table->views[2].len / 8;
    table->num_sets = table->views[0].len / 8 / SET_SIZE;
    if (table->num_sets < 1 || (table->num_sets & (table->num_sets - 1)) != 0 ||
        table->views[0].len != table->num_sets * SET_SIZE * 8 ||
        table->views[1].len != table->views[0].len) {
        PyErr_SetString(PyExc_ValueError, "tags and times are not of as many full sets");
        return -1;
    }
    return 0;
}

static int take_salt(PyObject *given, uint64_t *salt)
{
    *salt = PyLong_AsUnsignedLongLong(given);
    return *salt == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static Py_ssize_t depth_of(const Table *table, uint64_t salt, double since)
{
    for (Py_ssize_t depth = table->num_hashes; depth > 0; depth--) {
        uint64_t tag = mix64(table->chain[depth - 1] ^ salt);
        Py_ssize_t first = (Py_ssize_t)(tag & (uint64_t)(table->num_sets - 1)) * SET_SIZE;
        for (int i = 0; i < SET_SIZE; i++)
            if (table->tags[first + i] == tag && table->times[first + i] > since)
                return depth;
    }
    return 0;
}

/* known(tags, times, chain, salts, since) -> a depth for each salt */
static PyObject *known(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    Table table = {.num_views = 0};
    PyObject *found = NULL;
    if (num_args != 5 || !PyList_Check(args[3]) || !PyList_Check(args[4]) ||
        PyList_GET_SIZE(args[3]) != PyList_GET_SIZE(args[4])) {
        PyErr_SetString(PyExc_TypeError, "expected three buffers and two lists of one length");
        return NULL;
    }
    if (take(&table, args) < 0)
        goto done;
    Py_ssize_t num = PyList_GET_SIZE(args[3]);
    found = PyList_New(num);
    for (Py_ssize_t i = 0; found != NULL && i < num; i++) {
        uint64_t salt;
        PyObject *depth = NULL;
        double since = PyFloat_AsDouble(PyList_GET_ITEM(args[4], i));
        if ((since != -1.0 || !PyErr_Occurred()) &&
            take_salt(PyList_GET_ITEM(args[3], i), &salt) == 0)
            depth = PyLong_FromSsize_t(depth_of(&table, salt, since));
        if (depth == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, depth);
    }
done:
    release(&table);
    return found;
}

/* remember(tags, times, chain, salt, now) */
static PyObject *remember(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    Table table = {.num_views = 0};
    uint64_t salt;
    int is_done = 0;
    if (num_args != 5) {
        PyErr_SetString(PyExc_TypeError, "expected three buffers, a salt and a time");
        return NULL;
    }
    double now = PyFloat_AsDouble(args[4]);
    if ((now == -1.0 && PyErr_Occurred()) || take_salt(args[3], &salt) < 0 ||
        take(&table, args) < 0)
        goto done;
    for (Py_ssize_t depth = table.num_hashes; depth > 0; depth--) {
        uint64_t tag = mix64(table.chain[depth - 1] ^ salt);
        Py_ssize_t first = (Py_ssize_t)(tag & (uint64_t)(table.num_sets - 1)) * SET_SIZE;
        uint64_t *tags = table.tags + first;
        double *times = table.times + first;
        int place = 0;
        while (place < SET_SIZE - 1 && tags[place] != tag)
            place++;
        memmove(tags + 1, tags, (size_t)place * sizeof *tags);
        memmove(times + 1, times, (size_t)place * sizeof *times);
        tags[0] = tag;
        times[0] = now;
    }
    is_done = 1;
done:
    release(&table);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"known_depths", (PyCFunction)(void (*)(void))known, METH_FASTCALL, NULL},
    {"remember_chain", (PyCFunction)(void (*)(void))remember, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_prefix_memory(PyObject *module) { return PyModule_AddFunctions(module, methods); }
