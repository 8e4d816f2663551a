/* Appends to paged token histories and reads them: what `token_log` does with numpy, row by row.
 *
 * The columns belong to Python (`PageTable`, `Pool`), and a TokenPages holds them for as long as none
 * of them is replaced. Every row, page and position is checked against their lengths before anything
 * is written. A RowAppender does what `TokenLog.append` does, for the same rows each time.
 */
#include "module.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "token_pages.h"

static PyTypeObject *pages_type;
static PyObject *table_name, *num_free_name, *latest_name;

static void close_pages(PyObject *object)
{
    TokenPages *self = (TokenPages *)object;
    while (self->num_views > 0)
        PyBuffer_Release(&self->views[--self->num_views]);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* TokenPages(lengths, offsets, tables, free, pool) */
static PyObject *new_pages(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *columns[NUM_COLUMNS];
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "TokenPages: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOOOO", &columns[LENGTHS], &columns[OFFSETS], &columns[TABLES],
                          &columns[FREE], &columns[POOL]))
        return NULL;
    TokenPages *self = (TokenPages *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    for (; self->num_views < NUM_COLUMNS; self->num_views++) {
        if (PyObject_GetBuffer(columns[self->num_views], &self->views[self->num_views],
                               PyBUF_WRITABLE) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    const Py_buffer *views = self->views;
    const Py_ssize_t size = sizeof(int64_t);
    self->lengths = views[LENGTHS].buf, self->offsets = views[OFFSETS].buf;
    self->tables = views[TABLES].buf, self->free_pages = views[FREE].buf;
    self->pool = views[POOL].buf;
    self->num_rows = views[LENGTHS].len / size;
    self->num_stack = views[FREE].len / size;
    self->num_pages = views[POOL].len / (Py_ssize_t)sizeof(uint32_t) >> PAGE_SHIFT;
    self->width = self->num_rows ? views[TABLES].len / size / self->num_rows : 0;
    self->is_current = 1;
    if (views[OFFSETS].len != views[LENGTHS].len ||
        views[TABLES].len != self->num_rows * self->width * size) {
        PyErr_SetString(PyExc_ValueError, "TokenPages: columns of different lengths");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Opens an argument as a contiguous column of items of `size` bytes. */
static int open_column(PyObject *given, Py_buffer *view, Py_ssize_t size, int flags)
{
    if (PyObject_GetBuffer(given, view, flags) < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->len % size) {
        PyErr_SetString(PyExc_ValueError, "a column of items of another size");
        return -1;
    }
    return 0;
}

static void release(Py_buffer *views, int num)
{
    for (int at = 0; at < num; at++)
        if (views[at].obj != NULL)
            PyBuffer_Release(&views[at]);
}

/* The values that spans of these sizes have; -1: none can have them. */
static Py_ssize_t total_of(const Py_buffer *counts)
{
    const int64_t *sizes = counts->buf;
    Py_ssize_t total = 0;
    for (Py_ssize_t at = 0; at < counts->len / (Py_ssize_t)sizeof(int64_t); at++) {
        if (sizes[at] < 0 || sizes[at] > PY_SSIZE_T_MAX / 8 - total)
            return -1;
        total += sizes[at];
    }
    return total;
}

/* append(rows, values, num_free, counts) -> the pages then left in `free`
 *
 * counts: values of each row; None: one. -1 and no effect where pages, tables or pool have to grow
 * first, or a row comes twice.
 */
static PyObject *append(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const TokenPages *self = (TokenPages *)object;
    Py_buffer views[3] = {{0}};
    Py_ssize_t left = -1;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "append: expected 4 arguments");
        return NULL;
    }
    const Py_ssize_t num_free = PyLong_AsSsize_t(args[2]);
    const bool has_counts = args[3] != Py_None;
    if ((num_free == -1 && PyErr_Occurred()) ||
        open_column(args[0], &views[0], sizeof(int64_t), PyBUF_SIMPLE) < 0 ||
        open_column(args[1], &views[1], sizeof(uint32_t), PyBUF_SIMPLE) < 0 ||
        (has_counts && open_column(args[3], &views[2], sizeof(int64_t), PyBUF_SIMPLE) < 0))
        goto done;
    const int64_t *rows = views[0].buf;
    const Py_ssize_t num = views[0].len / (Py_ssize_t)sizeof(int64_t);
    const Py_ssize_t total = has_counts ? total_of(&views[2]) : num;
    if ((has_counts && views[2].len != views[0].len) ||
        views[1].len / (Py_ssize_t)sizeof(uint32_t) != total || num_free < 0 ||
        num_free > self->num_stack) {
        PyErr_SetString(PyExc_ValueError, "append: columns of different lengths");
        goto done;
    }
    Py_ssize_t stopped = 0;
    left = append_spans(self, rows, views[2].buf, views[1].buf, num, num_free, &stopped);
    if (left < 0 && (rows[stopped] < 0 || rows[stopped] >= self->num_rows))
        PyErr_Format(PyExc_IndexError, "row %lld of %zd", (long long)rows[stopped],
                     self->num_rows);
done:
    release(views, 3);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(left);
}

/* gather(found, rows, starts, counts)
 *
 * Fills `found` with counts[i] values of each row from starts[i] on; counts may be None: one each.
 */
static PyObject *gather(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const TokenPages *self = (TokenPages *)object;
    Py_buffer views[4] = {{0}};
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "gather: expected 4 arguments");
        return NULL;
    }
    if (open_column(args[0], &views[0], sizeof(uint32_t), PyBUF_WRITABLE) < 0 ||
        open_column(args[1], &views[1], sizeof(int64_t), PyBUF_SIMPLE) < 0 ||
        open_column(args[2], &views[2], sizeof(int64_t), PyBUF_SIMPLE) < 0 ||
        (args[3] != Py_None && open_column(args[3], &views[3], sizeof(int64_t), PyBUF_SIMPLE) < 0))
        goto done;
    uint32_t *found = views[0].buf;
    const int64_t *rows = views[1].buf, *starts = views[2].buf;
    const int64_t *counts = args[3] == Py_None ? NULL : views[3].buf;
    const Py_ssize_t room = views[0].len / (Py_ssize_t)sizeof(uint32_t);
    const Py_ssize_t num = views[1].len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t filled = 0;
    if (views[2].len != views[1].len || (counts && views[3].len != views[1].len)) {
        PyErr_SetString(PyExc_ValueError, "gather: columns of different lengths");
        goto done;
    }
    for (Py_ssize_t at = 0; at < num; at++) {
        int64_t row = rows[at], position = starts[at], left = counts ? counts[at] : 1;
        if (row < 0 || row >= self->num_rows || position < 0 || left < 0 ||
            self->lengths[row] - position < left || left > room - filled) {
            PyErr_SetString(PyExc_IndexError, "positions outside of the history");
            goto done;
        }
        while (left) {
            int64_t number = position >> PAGE_SHIFT, within = position & (PAGE_LEN - 1);
            int64_t some = PAGE_LEN - within < left ? PAGE_LEN - within : left;
            int64_t page = number < self->width ? self->tables[row * self->width + number] : -1;
            if (page < 0 || page >= self->num_pages) {
                PyErr_SetString(PyExc_IndexError, "positions without a page");
                goto done;
            }
            memcpy(found + filled, self->pool + page * PAGE_LEN + within, some * sizeof(uint32_t));
            filled += some, position += some, left -= some;
        }
    }
    if (filled != room)
        PyErr_SetString(PyExc_IndexError, "another number of values than asked for");
done:
    release(views, 4);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* last(found, rows): fills `found` with the last value of each row. */
static PyObject *last(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const TokenPages *self = (TokenPages *)object;
    Py_buffer views[2] = {{0}};
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "last: expected 2 arguments");
        return NULL;
    }
    if (open_column(args[0], &views[0], sizeof(uint32_t), PyBUF_WRITABLE) < 0 ||
        open_column(args[1], &views[1], sizeof(int64_t), PyBUF_SIMPLE) < 0)
        goto done;
    uint32_t *found = views[0].buf;
    const int64_t *rows = views[1].buf;
    const Py_ssize_t num = views[1].len / (Py_ssize_t)sizeof(int64_t);
    if (views[0].len != num * (Py_ssize_t)sizeof(uint32_t)) {
        PyErr_SetString(PyExc_ValueError, "last: columns of different lengths");
        goto done;
    }
    for (Py_ssize_t at = 0; at < num; at++) {
        const int64_t row = rows[at];
        const int64_t position = row < 0 || row >= self->num_rows ? -1 : self->lengths[row] - 1;
        const int64_t number = position >> PAGE_SHIFT;
        if (position < 0 || number >= self->width) {
            PyErr_SetString(PyExc_IndexError, "positions outside of the history");
            goto done;
        }
        const int64_t page = self->tables[row * self->width + number];
        if (page < 0 || page >= self->num_pages) {
            PyErr_SetString(PyExc_IndexError, "positions without a page");
            goto done;
        }
        found[at] = self->pool[page * PAGE_LEN + (position & (PAGE_LEN - 1))];
    }
done:
    release(views, 2);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* has_marked(marks, token_ids) -> whether the byte of any of these ids is set; of larger ids, none is */
static PyObject *has_marked(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    Py_buffer views[2] = {{0}};
    int is_marked = 0;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "has_marked: expected 2 arguments");
        return NULL;
    }
    if (open_column(args[0], &views[0], 1, PyBUF_SIMPLE) < 0 ||
        open_column(args[1], &views[1], sizeof(uint32_t), PyBUF_SIMPLE) < 0)
        goto done;
    const uint8_t *marks = views[0].buf;
    const uint32_t *ids = views[1].buf;
    const Py_ssize_t num = views[1].len / (Py_ssize_t)sizeof(uint32_t);
    for (Py_ssize_t at = 0; at < num && !is_marked; at++)
        is_marked = ids[at] < views[0].len && marks[ids[at]];
done:
    release(views, 2);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_marked);
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, "Append a value to each row."},
    {"last", (PyCFunction)(void (*)(void))last, METH_FASTCALL, "Read the last value of rows."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "Read values of rows."},
    {0},
};

static PyMemberDef members[] = {
    {"is_current", T_BOOL, offsetof(TokenPages, is_current), 0, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_pages},
    {Py_tp_dealloc, close_pages},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {"slipstream_ipc._native.TokenPages", sizeof(TokenPages), 0, Py_TPFLAGS_DEFAULT, slots};

/* ---- the same rows each time ------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *log, *table, *rows; /* the TokenLog and its PageTable, and the RowSet */
    TokenPages *pages;
    Py_buffer view; /* of the row numbers */
} RowAppender;

static void close_appender(PyObject *object)
{
    RowAppender *self = (RowAppender *)object;
    PyTypeObject *type = Py_TYPE(object);
    release(&self->view, 1);
    Py_XDECREF(self->log);
    Py_XDECREF(self->table);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->pages);
    type->tp_free(object);
    Py_DECREF(type);
}

/* RowAppender(log, pages, rows, row numbers) */
static PyObject *new_appender(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *log, *pages, *rows, *numbers;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "RowAppender: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO!OO", &log, pages_type, &pages, &rows, &numbers))
        return NULL;
    RowAppender *self = (RowAppender *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->log = Py_NewRef(log), self->rows = Py_NewRef(rows);
    self->pages = (TokenPages *)Py_NewRef(pages);
    self->table = PyObject_GetAttr(log, table_name);
    if (self->table == NULL || open_column(numbers, &self->view, sizeof(int64_t), PyBUF_SIMPLE) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* The number of free pages; -1: error. */
static Py_ssize_t num_free_of(PyObject *table)
{
    PyObject *given = PyObject_GetAttr(table, num_free_name);
    if (given == NULL)
        return -1;
    const Py_ssize_t num = PyLong_AsSsize_t(given);
    Py_DECREF(given);
    return num;
}

static int set_num_free(PyObject *table, Py_ssize_t num)
{
    PyObject *number = PyLong_FromSsize_t(num);
    const int failed = number == NULL || PyObject_SetAttr(table, num_free_name, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int set_latest(const RowAppender *self, PyObject *values)
{
    PyObject *latest = PyTuple_Pack(3, self->rows, values, Py_None);
    const int failed = latest == NULL || PyObject_SetAttr(self->log, latest_name, latest) < 0;
    Py_XDECREF(latest);
    return failed ? -1 : 0;
}

/* append(values) -> whether they were appended; no effect where they were not */
static PyObject *append_again(PyObject *object, PyObject *values)
{
    const RowAppender *self = (RowAppender *)object;
    if (!self->pages->is_current)
        Py_RETURN_FALSE;
    Py_buffer view = {0};
    PyObject *is_appended = NULL;
    const Py_ssize_t num = self->view.len / (Py_ssize_t)sizeof(int64_t);
    if (open_column(values, &view, sizeof(uint32_t), PyBUF_SIMPLE) < 0)
        goto done;
    if (view.len != num * (Py_ssize_t)sizeof(uint32_t)) {
        PyErr_SetString(PyExc_ValueError, "append: a value for each row expected");
        goto done;
    }
    const Py_ssize_t num_free = num_free_of(self->table);
    if (num_free == -1 && PyErr_Occurred())
        goto done;
    Py_ssize_t stopped, left = -1;
    if (num_free >= 0 && num_free <= self->pages->num_stack)
        left = append_spans(self->pages, self->view.buf, NULL, view.buf, num, num_free, &stopped);
    if (left >= 0 && ((left != num_free && set_num_free(self->table, left) < 0) ||
                      set_latest(self, values) < 0))
        goto done;
    is_appended = PyBool_FromLong(left >= 0);
done:
    release(&view, 1);
    return is_appended;
}

static PyMethodDef appender_methods[] = {
    {"append", append_again, METH_O, "Append a value to each of the rows."},
    {0},
};

static PyType_Slot appender_slots[] = {
    {Py_tp_new, new_appender},
    {Py_tp_dealloc, close_appender},
    {Py_tp_methods, appender_methods},
    {0, NULL},
};

static PyType_Spec appender_spec = {
    "slipstream_ipc._native.RowAppender", sizeof(RowAppender), 0, Py_TPFLAGS_DEFAULT, appender_slots};

/* ---- the module ------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"has_marked", (PyCFunction)(void (*)(void))has_marked, METH_FASTCALL, "Whether any is marked."},
    {0},
};

int add_token_pages(PyObject *module)
{
    table_name = PyUnicode_InternFromString("table");
    num_free_name = PyUnicode_InternFromString("num_free");
    latest_name = PyUnicode_InternFromString("latest");
    if (table_name == NULL || num_free_name == NULL || latest_name == NULL)
        return -1;
    pages_type = add_type(module, &spec);
    if (pages_type == NULL || add_type(module, &appender_spec) == NULL)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
