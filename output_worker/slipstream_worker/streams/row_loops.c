/* The loops over the rows of a step and of a message, over the buffers of StreamColumns.
 *
 * The same as ReferenceLoops in row_loops.py, which says what each function does; a test holds the
 * two together. Every row, entry and length is checked against the buffers before it is used. The
 * buffers are taken once; StreamColumns makes a new object whenever it replaces an array.
 */
#include "module.h"

#include <string.h>

#include "row_loops.h"

/* ---- arguments -------------------------------------------------------------------------- */

/* A column of an argument: `num` items of a contiguous buffer. */
typedef struct {
    Py_buffer view;
    Py_ssize_t num;
} Column;

static void release(Column *columns, int num)
{
    for (int i = 0; i < num; i++)
        if (columns[i].view.obj != NULL)
            PyBuffer_Release(&columns[i].view);
}

/* Take a column of items of `size` bytes; None is a column without items. */
static int take(PyObject *given, Column *column, Py_ssize_t size, const char *name)
{
    column->num = 0;
    if (given == Py_None) {
        column->view.obj = NULL;
        column->view.buf = NULL;
        return 0;
    }
    if (PyObject_GetBuffer(given, &column->view, PyBUF_SIMPLE) < 0) {
        column->view.obj = NULL;
        return -1;
    }
    if (column->view.len % size != 0 || (uintptr_t)column->view.buf % size != 0) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes, or not aligned to %zd", name,
                     column->view.len, size);
        return -1;
    }
    column->num = column->view.len / size;
    return 0;
}

static int check_rows(const RowLoops *self, const Column *rows)
{
    const int64_t *row = rows->view.buf;
    for (Py_ssize_t i = 0; i < rows->num; i++)
        if (row[i] < 0 || row[i] >= self->num_rows) {
            PyErr_Format(PyExc_IndexError, "row %lld of %zd", (long long)row[i], self->num_rows);
            return -1;
        }
    return 0;
}

static int check_length(const char *name, Py_ssize_t given, Py_ssize_t expected)
{
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zd entries, expected %zd", name, given, expected);
    return -1;
}

static int check_num_args(Py_ssize_t given, Py_ssize_t expected)
{
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", given, expected);
    return -1;
}

/* ---- a step ----------------------------------------------------------------------------- */

/* append(rows, counts, token_ids) -> indices of the rows whose tokens have to be checked */
static PyObject *append(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    RowLoops *self = (RowLoops *)object;
    Column in[3] = {0};
    PyObject *to_check = NULL;
    if (check_num_args(num_args, 3) < 0 || take(args[0], &in[0], 8, "rows") < 0 ||
        take(args[1], &in[1], 8, "counts") < 0 || take(args[2], &in[2], 4, "token_ids") < 0 ||
        check_rows(self, &in[0]) < 0)
        goto done;
    const int64_t *rows = in[0].view.buf, *counts = in[1].view.buf;
    const uint32_t *ids = in[2].view.buf;
    Py_ssize_t num = in[0].num, left = in[2].num;
    if (args[1] == Py_None) {
        counts = NULL;
        if (check_length("token_ids", left, num) < 0)
            goto done;
    } else {
        if (check_length("counts", in[1].num, num) < 0)
            goto done;
        for (Py_ssize_t i = 0; i < num; i++) {
            if (counts[i] < 1 || counts[i] > left) {
                PyErr_SetString(PyExc_ValueError, "counts: not those of the tokens");
                goto done;
            }
            left -= counts[i];
        }
        if (check_length("token_ids behind counts", left, 0) < 0)
            goto done;
    }
    to_check = PyList_New(0);
    if (to_check == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < num; i++) {
        int64_t row = rows[i], count = counts == NULL ? 1 : counts[i];
        self->lengths[row] += count;
        self->last_ids[row] = ids[count - 1];
        self->is_dirty[row] = 1;
        bool needs_check = !self->is_fast[row] || self->lengths[row] >= self->max_tokens[row];
        for (int64_t j = 0; j < count && !needs_check; j++)
            needs_check = !is_plain_for(self, row, ids[j]);
        ids += count;
        if (needs_check) {
            PyObject *index = PyLong_FromSsize_t(i);
            if (index == NULL || PyList_Append(to_check, index) < 0) {
                Py_XDECREF(index);
                Py_CLEAR(to_check);
                goto done;
            }
            Py_DECREF(index);
        }
    }
done:
    release(in, 3);
    return to_check;
}

/* ---- a message -------------------------------------------------------------------------- */

/* due(rows, urgent) -> (fast rows that are due, their counts, slow rows with news) */
static PyObject *due(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    RowLoops *self = (RowLoops *)object;
    Column in[1] = {0};
    PyObject *found = NULL, *fast = NULL, *counts = NULL, *slow = NULL;
    if (check_num_args(num_args, 2) < 0 || take(args[0], &in[0], 8, "rows") < 0 ||
        check_rows(self, &in[0]) < 0)
        goto done;
    const int64_t *rows = in[0].view.buf;
    bool urgent = args[1] == Py_True, has_several = false;
    Py_ssize_t num = 0;
    fast = PyBytes_FromStringAndSize(NULL, in[0].num * 8);
    counts = PyBytes_FromStringAndSize(NULL, in[0].num * 4);
    slow = PyList_New(0);
    if (fast == NULL || counts == NULL || slow == NULL)
        goto done;
    char *fast_at = PyBytes_AS_STRING(fast), *counts_at = PyBytes_AS_STRING(counts);
    for (Py_ssize_t i = 0; i < in[0].num; i++) {
        int64_t row = rows[i];
        if (!self->is_dirty[row])
            continue;
        if (!self->is_fast[row]) {
            PyObject *number = PyLong_FromLongLong(row);
            if (number == NULL || PyList_Append(slow, number) < 0) {
                Py_XDECREF(number);
                goto done;
            }
            Py_DECREF(number);
            continue;
        }
        int64_t sent = self->sent_tokens[row], new = self->lengths[row] - sent;
        if (new <= 0 || new > UINT32_MAX || (sent && (urgent || new < self->intervals[row])))
            continue;
        uint32_t count = (uint32_t)new;
        has_several |= count != 1;
        memcpy(fast_at + 8 * num, &row, 8);
        memcpy(counts_at + 4 * num, &count, 4);
        num++;
    }
    if (_PyBytes_Resize(&fast, num * 8) < 0 ||
        _PyBytes_Resize(&counts, has_several ? num * 4 : 0) < 0)
        goto done;
    found = PyTuple_Pack(3, fast, counts, slow);
done:
    Py_XDECREF(fast);
    Py_XDECREF(counts);
    Py_XDECREF(slow);
    release(in, 1);
    return found;
}

/* The text of a fast row's tokens. */
static PyObject *text_of(RowLoops *self, int64_t row, const uint32_t *ids, uint32_t count)
{
    Py_ssize_t num_chars = 0;
    Py_UCS4 largest = 0;
    for (uint32_t j = 0; j < count; j++) {
        int64_t at = entry_of(self, row, ids[j]);
        if (at < 0 || at >= PyList_GET_SIZE(self->texts)) {
            PyErr_Format(PyExc_IndexError, "row %lld has no texts", (long long)row);
            return NULL;
        }
        PyObject *text = PyList_GET_ITEM(self->texts, at);
        if (count == 1)
            return Py_NewRef(text);
        Py_UCS4 its_largest = PyUnicode_MAX_CHAR_VALUE(text);
        largest = its_largest > largest ? its_largest : largest;
        num_chars += PyUnicode_GET_LENGTH(text);
    }
    PyObject *joined = PyUnicode_New(num_chars, largest);
    Py_ssize_t end = 0;
    for (uint32_t j = 0; j < count && joined != NULL; j++) {
        PyObject *text = PyList_GET_ITEM(self->texts, entry_of(self, row, ids[j]));
        Py_ssize_t len = PyUnicode_GET_LENGTH(text);
        if (len && PyUnicode_CopyCharacters(joined, end, text, 0, len) < 0)
            Py_CLEAR(joined);
        end += len;
    }
    return joined;
}

/* entries(rows, counts, token_ids) -> (handles, chars, starts, texts, token_ids, lens, kinds) */
static PyObject *entries(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    enum { HANDLES, CHARS, STARTS, IDS, LENS, KINDS, NUM };
    RowLoops *self = (RowLoops *)object;
    Column in[3] = {0};
    PyObject *out[NUM] = {NULL}, *texts = NULL, *found = NULL;
    if (check_num_args(num_args, 3) < 0 || take(args[0], &in[0], 8, "rows") < 0 ||
        take(args[1], &in[1], 4, "counts") < 0 || take(args[2], &in[2], 4, "token_ids") < 0 ||
        check_rows(self, &in[0]) < 0)
        goto done;
    const int64_t *rows = in[0].view.buf;
    const uint32_t *counts = in[1].num ? in[1].view.buf : NULL, *ids = in[2].view.buf;
    Py_ssize_t num = in[0].num;
    if (counts != NULL) {
        uint64_t total = 0;
        if (check_length("counts", in[1].num, num) < 0)
            goto done;
        for (Py_ssize_t i = 0; i < num; i++)
            total += counts[i];
        if (total != (uint64_t)in[2].num || args[2] == Py_None) {
            PyErr_SetString(PyExc_ValueError, "counts: not those of the tokens");
            goto done;
        }
    } else if (args[2] != Py_None && check_length("token_ids", in[2].num, num) < 0)
        goto done;
    for (int i = 0; i < NUM; i++)
        if (i != IDS || args[2] == Py_None) {
            out[i] = PyBytes_FromStringAndSize(NULL, 4 * num);
            if (out[i] == NULL)
                goto done;
        }
    if (out[IDS] == NULL) {
        out[IDS] = PyBytes_FromStringAndSize(in[2].view.buf, in[2].view.len);
        if (out[IDS] == NULL)
            goto done;
    }
    texts = PyList_New(num);
    if (texts == NULL)
        goto done;
    bool has_kinds = false;
    for (Py_ssize_t i = 0; i < num; i++) {
        int64_t row = rows[i];
        uint32_t values[NUM] = {self->handles[row], (uint32_t)self->sent_chars[row],
                                (uint32_t)self->sent_tokens[row], self->last_ids[row], 0, 0};
        uint32_t count = counts == NULL ? 1 : counts[i];
        PyObject *text = text_of(self, row, ids == NULL ? &values[IDS] : ids, count);
        if (text == NULL)
            goto done;
        PyList_SET_ITEM(texts, i, text);
        values[LENS] = (uint32_t)PyUnicode_GET_LENGTH(text);
        values[KINDS] = values[LENS] ? (uint32_t)self->kinds[row] : 0;
        has_kinds |= values[KINDS] != 0;
        for (int j = 0; j < NUM; j++)
            if (j != IDS || ids == NULL)
                memcpy(PyBytes_AS_STRING(out[j]) + 4 * i, &values[j], 4);
        if (ids != NULL)
            ids += count;
    }
    if (!has_kinds && _PyBytes_Resize(&out[KINDS], 0) < 0)
        goto done;
    found = PyTuple_Pack(7, out[HANDLES], out[CHARS], out[STARTS], texts, out[IDS], out[LENS],
                         out[KINDS]);
done:
    for (int i = 0; i < NUM; i++)
        Py_XDECREF(out[i]);
    Py_XDECREF(texts);
    release(in, 3);
    return found;
}

/* sent(rows, starts, counts, lens, now, bounds, buckets, total) -> (row, count) of first ones */
static PyObject *sent(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    RowLoops *self = (RowLoops *)object;
    Column in[7] = {0};
    PyObject *first = NULL;
    if (check_num_args(num_args, 8) < 0)
        return NULL;
    double now = PyFloat_AsDouble(args[4]);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    if (take(args[0], &in[0], 8, "rows") < 0 || take(args[1], &in[1], 4, "starts") < 0 ||
        take(args[2], &in[2], 4, "counts") < 0 || take(args[3], &in[3], 4, "lens") < 0 ||
        take(args[5], &in[4], 8, "bounds") < 0 || take(args[6], &in[5], 8, "buckets") < 0 ||
        take(args[7], &in[6], 8, "total") < 0 || check_rows(self, &in[0]) < 0)
        goto done;
    Py_ssize_t num = in[0].num, num_bounds = in[4].num;
    if (check_length("starts", in[1].num, num) < 0 || check_length("lens", in[3].num, num) < 0 ||
        (in[2].num && check_length("counts", in[2].num, num) < 0) ||
        check_length("buckets", in[5].num, num_bounds + 1) < 0 ||
        check_length("total", in[6].num, 1) < 0)
        goto done;
    if (in[5].view.readonly || in[6].view.readonly) {
        PyErr_SetString(PyExc_ValueError, "a histogram that cannot be written");
        goto done;
    }
    const int64_t *rows = in[0].view.buf;
    const uint32_t *starts = in[1].view.buf, *lens = in[3].view.buf;
    const uint32_t *counts = in[2].num ? in[2].view.buf : NULL;
    const double *bounds = in[4].view.buf;
    int64_t *buckets = in[5].view.buf;
    double *total = in[6].view.buf, last = -1.0;
    Py_ssize_t bucket = 0;
    first = PyList_New(0);
    if (first == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < num; i++) {
        int64_t row = rows[i];
        uint32_t count = counts == NULL ? 1 : counts[i];
        double before = self->delivered_at[row];
        bool is_first = before == 0.0 && self->sent_tokens[row] == 0;
        int64_t end = (int64_t)starts[i] + count;
        self->delivered_at[row] = now;
        self->sent_tokens[row] = end;
        self->sent_chars[row] += lens[i];
        self->is_dirty[row] = self->lengths[row] > end;
        if (is_first) {
            PyObject *pair = Py_BuildValue("(LI)", (long long)row, (unsigned int)count);
            if (pair == NULL || PyList_Append(first, pair) < 0) {
                Py_XDECREF(pair);
                Py_CLEAR(first);
                goto done;
            }
            Py_DECREF(pair);
        } else if (before != 0.0) {
            double gap = now - before;
            if (gap != last)
                bucket = bucket_of(bounds, num_bounds, last = gap);
            buckets[bucket]++;
            *total += gap;
        }
    }
done:
    release(in, 7);
    return first;
}

/* ---- the object ------------------------------------------------------------------------- */

static int take_buffer(RowLoops *self, PyObject *columns, const char *name, int flags,
                       Py_ssize_t size, Py_ssize_t num, void *at)
{
    PyObject *array = PyMapping_GetItemString(columns, name);
    if (array == NULL)
        return -1;
    Py_buffer *view = &self->views[self->num_views];
    int failed = PyObject_GetBuffer(array, view, flags);
    Py_DECREF(array);
    if (failed)
        return -1;
    self->num_views++;
    if (view->itemsize != size || (num >= 0 && view->len != size * num) ||
        (uintptr_t)view->buf % size != 0) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes in items of %zd, expected %zd of %zd", name,
                     view->len, view->itemsize, num, size);
        return -1;
    }
    *(void **)at = view->buf;
    return 0;
}

enum { READ = PyBUF_ND, WRITTEN = PyBUF_ND | PyBUF_WRITABLE };

static PyObject *new_loops(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"columns", "texts", "vocab_size", NULL};
    PyObject *columns, *texts;
    long long vocab_size;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!L", names, &columns, &PyList_Type, &texts,
                                     &vocab_size))
        return NULL;
    RowLoops *self = (RowLoops *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->texts = Py_NewRef(texts);
    self->vocab_size = vocab_size;
    self->num_entries = PyList_GET_SIZE(texts);
    if (take_buffer(self, columns, "is_fast", READ, 1, -1, &self->is_fast) < 0)
        goto failed;
    self->num_rows = self->views[0].len;
    Py_ssize_t n = self->num_rows, m = self->num_entries;
    if (take_buffer(self, columns, "is_dirty", WRITTEN, 1, n, &self->is_dirty) < 0 ||
        take_buffer(self, columns, "intervals", READ, 8, n, &self->intervals) < 0 ||
        take_buffer(self, columns, "handles", READ, 4, n, &self->handles) < 0 ||
        take_buffer(self, columns, "lengths", WRITTEN, 8, n, &self->lengths) < 0 ||
        take_buffer(self, columns, "last_ids", WRITTEN, 4, n, &self->last_ids) < 0 ||
        take_buffer(self, columns, "sent_tokens", WRITTEN, 8, n, &self->sent_tokens) < 0 ||
        take_buffer(self, columns, "sent_chars", WRITTEN, 8, n, &self->sent_chars) < 0 ||
        take_buffer(self, columns, "kinds", READ, 8, n, &self->kinds) < 0 ||
        take_buffer(self, columns, "delivered_at", WRITTEN, 8, n, &self->delivered_at) < 0 ||
        take_buffer(self, columns, "max_tokens", READ, 8, n, &self->max_tokens) < 0 ||
        take_buffer(self, columns, "firsts", READ, 8, n, &self->firsts) < 0 ||
        take_buffer(self, columns, "sets", READ, 8, n, &self->sets) < 0 ||
        take_buffer(self, columns, "stop_low", READ, 8, n, &self->stop_low) < 0 ||
        take_buffer(self, columns, "stop_high", READ, 8, n, &self->stop_high) < 0 ||
        take_buffer(self, columns, "is_plain", READ, 1, m, &self->is_plain) < 0 ||
        take_buffer(self, columns, "low", READ, 8, m, &self->low) < 0 ||
        take_buffer(self, columns, "high", READ, 8, m, &self->high) < 0 ||
        take_buffer(self, columns, "harmless", READ, 1, -1, &self->harmless) < 0)
        goto failed;
    Py_buffer *harmless = &self->views[self->num_views - 1];
    if (harmless->ndim != 2) {
        PyErr_SetString(PyExc_ValueError, "harmless: expected [sets, token ids]");
        goto failed;
    }
    self->num_sets = harmless->shape[0];
    self->num_ids = harmless->shape[1];
    for (Py_ssize_t i = 0; i < m; i++)
        if (!PyUnicode_Check(PyList_GET_ITEM(texts, i))) {
            PyErr_SetString(PyExc_TypeError, "texts: expected strings");
            goto failed;
        }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void dealloc(PyObject *object)
{
    RowLoops *self = (RowLoops *)object;
    for (Py_ssize_t i = 0; i < self->num_views; i++)
        PyBuffer_Release(&self->views[i]);
    Py_XDECREF(self->texts);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {METHOD(append), METHOD(due), METHOD(entries), METHOD(sent),
                                {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, new_loops},
                              {Py_tp_dealloc, dealloc},
                              {Py_tp_methods, methods},
                              {0, NULL}};
static PyType_Spec spec = {
    .name = "slipstream_worker._native.RowLoops",
    .basicsize = sizeof(RowLoops),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
int add_row_loops(PyObject *module) { return add_type(module, &spec) == NULL ? -1 : 0; }
