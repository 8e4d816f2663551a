/* Writes log-probabilities that gathered for the same rows into their pages: what
 * `logprob_log._Width._write_deferred` does with numpy, row by row.
 */
#include "module.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define PAGE_SHIFT 6 /* as in pages.py */
#define PAGE_LEN (1 << PAGE_SHIFT)

enum { VALUES, IDS, RANKS, NUM_COLUMNS };
static PyObject *column_names[NUM_COLUMNS];

enum { ROWS, LENGTHS, OFFSETS, TABLES, FREE, POOLS, NUM_VIEWS = POOLS + NUM_COLUMNS };

typedef struct {
    Py_buffer views[NUM_VIEWS];
    const uint8_t **columns; /* [NUM_COLUMNS * num_tokens] */
    Py_ssize_t num_tokens, num, num_rows, num_pages, table_width, num_free;
    size_t num_bytes[NUM_COLUMNS]; /* of one token */
} Writing;

static void release(Writing *writing)
{
    for (int at = 0; at < NUM_VIEWS; at++)
        if (writing->views[at].obj != NULL)
            PyBuffer_Release(&writing->views[at]);
    PyMem_Free(writing->columns);
}

/* Opens the arguments' columns and checks their lengths; -1: error. */
static int open_views(Writing *writing, PyObject *const *given, Py_ssize_t width)
{
    Py_buffer *views = writing->views;
    for (int at = 0; at < NUM_VIEWS; at++) {
        const int flags = at == ROWS ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(given[at], &views[at], flags) < 0) {
            views[at].obj = NULL;
            return -1;
        }
    }
    writing->num = views[ROWS].len / 8, writing->num_rows = views[LENGTHS].len / 8;
    writing->table_width = writing->num_rows ? views[TABLES].len / 8 / writing->num_rows : 0;
    writing->num_pages = PY_SSIZE_T_MAX;
    bool is_right = views[OFFSETS].len == views[LENGTHS].len &&
                    views[TABLES].len == 8 * writing->num_rows * writing->table_width &&
                    writing->num_free >= 0 && writing->num_free <= views[FREE].len / 8;
    for (int at = 0; at < NUM_COLUMNS; at++) {
        writing->num_bytes[at] = 4 * (size_t)(at == RANKS ? 1 : width);
        const Py_ssize_t page = (Py_ssize_t)writing->num_bytes[at] * PAGE_LEN;
        if (views[POOLS + at].len / page < writing->num_pages)
            writing->num_pages = views[POOLS + at].len / page;
    }
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "write: columns of different lengths");
    return is_right ? 0 : -1;
}

/* Finds the columns of each token, whose bytes stay those of `deferred`; -1: error. */
static int find_columns(Writing *writing, PyObject *deferred)
{
    writing->num_tokens = PyList_GET_SIZE(deferred);
    writing->columns = PyMem_Calloc((size_t)(NUM_COLUMNS * writing->num_tokens + 1), sizeof(void *));
    if (writing->columns == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t token = 0; token < writing->num_tokens; token++)
        for (int at = 0; at < NUM_COLUMNS; at++) {
            PyObject *column = PyObject_GetAttr(PyList_GET_ITEM(deferred, token), column_names[at]);
            if (column == NULL)
                return -1;
            const bool is_right = PyBytes_CheckExact(column) && Py_REFCNT(column) > 1 &&
                                  (size_t)PyBytes_GET_SIZE(column) ==
                                      writing->num_bytes[at] * (size_t)writing->num;
            writing->columns[NUM_COLUMNS * token + at] = (const uint8_t *)PyBytes_AS_STRING(column);
            Py_DECREF(column);
            if (!is_right) {
                PyErr_SetString(PyExc_ValueError, "write: columns that do not fit the rows");
                return -1;
            }
        }
    return 0;
}

/* True if tokens can be appended to a row; num_taken: the pages that that takes. */
static bool fits(const Writing *writing, int64_t row, Py_ssize_t *num_taken)
{
    if (row < 0 || row >= writing->num_rows)
        return false;
    const int64_t *lengths = writing->views[LENGTHS].buf, *free_pages = writing->views[FREE].buf;
    const int64_t *tables = writing->views[TABLES].buf;
    const int64_t length = lengths[row], end = length + writing->num_tokens;
    if (length < 0 || (end - 1) >> PAGE_SHIFT >= writing->table_width)
        return false;
    const int64_t first = (length + PAGE_LEN - 1) >> PAGE_SHIFT; /* page to be begun */
    if (length & (PAGE_LEN - 1)) {
        const int64_t page = tables[row * writing->table_width + first - 1];
        if (page < 0 || page >= writing->num_pages)
            return false;
    }
    for (int64_t number = first; number < (end + PAGE_LEN - 1) >> PAGE_SHIFT; number++) {
        const Py_ssize_t at = writing->num_free - ++*num_taken;
        if (at < 0 || free_pages[at] < 0 || free_pages[at] >= writing->num_pages)
            return false;
    }
    return true;
}

static void write_row(const Writing *writing, Py_ssize_t k, Py_ssize_t *left)
{
    const Py_buffer *views = writing->views;
    const int64_t row = ((const int64_t *)views[ROWS].buf)[k];
    const int64_t *free_pages = views[FREE].buf;
    int64_t *lengths = views[LENGTHS].buf, *offsets = views[OFFSETS].buf;
    int64_t *table = (int64_t *)views[TABLES].buf + row * writing->table_width;
    int64_t position = ~lengths[row];
    for (Py_ssize_t token = 0; token < writing->num_tokens; token++, position++) {
        const int64_t number = position >> PAGE_SHIFT;
        if (!(position & (PAGE_LEN - 1))) {
            table[number] = free_pages[--*left];
            offsets[row] = (table[number] - number) * PAGE_LEN;
        }
        const int64_t index = table[number] * PAGE_LEN + (position & (PAGE_LEN - 1));
        for (int at = 0; at < NUM_COLUMNS; at++) {
            const size_t size = writing->num_bytes[at];
            memcpy((uint8_t *)views[POOLS + at].buf + (size_t)index * size,
                   writing->columns[NUM_COLUMNS * token + at] + (size_t)k * size, size);
        }
    }
    lengths[row] = position;
}

/* The pages that are then left; -1 without effect. */
static Py_ssize_t write_rows(const Writing *writing)
{
    const int64_t *rows = writing->views[ROWS].buf;
    int64_t *lengths = writing->views[LENGTHS].buf;
    Py_ssize_t seen = 0, num_taken = 0, left = writing->num_free;
    for (; seen < writing->num && fits(writing, rows[seen], &num_taken); seen++)
        lengths[rows[seen]] = ~lengths[rows[seen]]; /* negative: a row that comes twice is found */
    if (seen < writing->num) {
        for (Py_ssize_t at = 0; at < seen; at++)
            lengths[rows[at]] = ~lengths[rows[at]];
        return -1;
    }
    for (Py_ssize_t k = 0; k < writing->num; k++)
        write_row(writing, k, &left);
    return left;
}

/* write(deferred, width, num_free, rows, lengths, offsets, tables, free, values, ids, ranks) -> the
 * pages then left in `free`
 *
 * -1 and no effect where pages, tables or pools have to grow first, or a row comes twice or is none.
 */
static PyObject *write_deferred(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    Writing writing = {0};
    if (num_args != 3 + NUM_VIEWS || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write: expected a list and 10 arguments");
        return NULL;
    }
    const Py_ssize_t width = PyLong_AsSsize_t(args[1]);
    writing.num_free = PyLong_AsSsize_t(args[2]);
    Py_ssize_t left = -1;
    if (PyErr_Occurred())
        return NULL;
    if (width < 1 || width > 1 << 24)
        PyErr_SetString(PyExc_ValueError, "write: a width from 1 on expected");
    else if (open_views(&writing, args + 3, width) == 0 && find_columns(&writing, args[0]) == 0)
        left = write_rows(&writing);
    release(&writing);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(left);
}

static PyMethodDef functions[] = {
    {"write_logprobs", (PyCFunction)(void (*)(void))write_deferred, METH_FASTCALL, "Write what gathered."},
    {0},
};

int add_logprob_pages(PyObject *module)
{
    static const char *const names[NUM_COLUMNS] = {"values", "ids", "ranks"};
    for (int at = 0; at < NUM_COLUMNS; at++)
        if ((column_names[at] = PyUnicode_InternFromString(names[at])) == NULL)
            return -1;
    return PyModule_AddFunctions(module, functions);
}
