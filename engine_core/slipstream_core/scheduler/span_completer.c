/* Takes in a step that gave live rows several tokens each; see span_completer.py. */
#include "module.h"

#include <stdbool.h>

#include "token_pages.h"

enum { GENERATION, LIMIT, LOGPROB_LIMIT, KNOWN, COMPUTED, SLOT, MAY_NEED_MASK, NUM_VIEWS };

static PyTypeObject *pages_type;

typedef struct {
    PyObject_HEAD
    TokenPages *pages;
    int num_views;
    Py_buffer views[NUM_VIEWS]; /* by row */
    Py_ssize_t num_rows;
} SpanCompleter;

static void dealloc(PyObject *object)
{
    SpanCompleter *self = (SpanCompleter *)object;
    PyTypeObject *type = Py_TYPE(object);
    while (self->num_views > 0)
        PyBuffer_Release(&self->views[--self->num_views]);
    Py_XDECREF(self->pages);
    type->tp_free(object);
    Py_DECREF(type);
}

/* SpanCompleter(pages, (generation, limit, logprob_limit, known, computed, slot, may_need_mask)) */
static PyObject *new_completer(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *pages, *columns[NUM_VIEWS];
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "SpanCompleter: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!(OOOOOOO)", pages_type, &pages, &columns[GENERATION],
                          &columns[LIMIT], &columns[LOGPROB_LIMIT], &columns[KNOWN],
                          &columns[COMPUTED], &columns[SLOT], &columns[MAY_NEED_MASK]))
        return NULL;
    SpanCompleter *self = (SpanCompleter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->pages = (TokenPages *)Py_NewRef(pages);
    for (; self->num_views < NUM_VIEWS; self->num_views++)
        if (PyObject_GetBuffer(columns[self->num_views], &self->views[self->num_views],
                               PyBUF_WRITABLE) < 0)
            goto failed;
    self->num_rows = self->views[MAY_NEED_MASK].len;
    for (int at = 0; at < MAY_NEED_MASK; at++)
        if (self->views[at].len != 8 * self->num_rows) {
            PyErr_SetString(PyExc_ValueError, "SpanCompleter: columns of different lengths");
            goto failed;
        }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

enum { ROWS, GENERATIONS, KV_LENS, COUNTS, IDS, NUM_ARGS };

/* True if each row is alive, needs no mask, and stays below its limits. */
static bool are_plain(const SpanCompleter *self, const Py_buffer *args, Py_ssize_t num)
{
    const int64_t *rows = args[ROWS].buf, *generations = args[GENERATIONS].buf;
    const int64_t *counts = args[COUNTS].buf, *generation = self->views[GENERATION].buf;
    const int64_t *limit = self->views[LIMIT].buf, *room = self->views[LOGPROB_LIMIT].buf;
    const uint8_t *may_need_mask = self->views[MAY_NEED_MASK].buf;
    for (Py_ssize_t at = 0; at < num; at++) {
        const int64_t row = rows[at];
        if (row < 0 || row >= self->num_rows || row >= self->pages->num_rows || counts[at] < 1 ||
            generation[row] != generations[at] || may_need_mask[row])
            return false;
        const int64_t length = self->pages->lengths[row];
        if (counts[at] >= limit[row] - length || counts[at] > room[row] - length)
            return false;
    }
    return true;
}

/* complete(rows, generations, kv_lens, counts, ids, num_free, has_later)
 * -> (pages left, whether a generation began); None where it has no effect: see span_completer.py
 */
static PyObject *complete(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const SpanCompleter *self = (SpanCompleter *)object;
    static const int sizes[NUM_ARGS] = {8, 8, 4, 8, 4};
    Py_buffer views[NUM_ARGS] = {{0}};
    PyObject *found = NULL;
    if (num_args != NUM_ARGS + 2) {
        PyErr_SetString(PyExc_TypeError, "complete: expected 7 arguments");
        return NULL;
    }
    const Py_ssize_t num_free = PyLong_AsSsize_t(args[NUM_ARGS]);
    const int has_later = PyObject_IsTrue(args[NUM_ARGS + 1]);
    if (PyErr_Occurred())
        return NULL;
    int num_open = 0;
    for (; num_open < NUM_ARGS; num_open++)
        if (PyObject_GetBuffer(args[num_open], &views[num_open], PyBUF_SIMPLE) < 0)
            goto done;
    const Py_ssize_t num = views[ROWS].len / 8;
    for (int at = 0; at < IDS; at++)
        if (views[at].len != num * sizes[at]) {
            PyErr_SetString(PyExc_ValueError, "complete: columns of different lengths");
            goto done;
        }
    const int64_t *rows = views[ROWS].buf, *counts = views[COUNTS].buf;
    Py_ssize_t left = -1, stopped, total = 0;
    if (self->pages->is_current && num_free >= 0 && num_free <= self->pages->num_stack &&
        are_plain(self, views, num)) {
        for (Py_ssize_t at = 0; at < num; at++)
            total += (Py_ssize_t)counts[at];
        if (views[IDS].len != 4 * total) {
            PyErr_SetString(PyExc_ValueError, "complete: ids that do not fit the counts");
            goto done;
        }
        left = append_spans(self->pages, rows, counts, views[IDS].buf, num, num_free, &stopped);
    }
    if (left < 0) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    int64_t *known = self->views[KNOWN].buf, *computed = self->views[COMPUTED].buf;
    int64_t *generation = self->views[GENERATION].buf;
    const int64_t *slot = self->views[SLOT].buf;
    const int32_t *kv_lens = views[KV_LENS].buf;
    bool has_begun = false;
    for (Py_ssize_t at = 0; at < num; at++) {
        const int64_t row = rows[at];
        if (counts[at] == 1)
            continue;
        known[row] = self->pages->lengths[row];
        if (slot[row] >= 0)
            computed[row] = kv_lens[at];
        if (has_later) {
            generation[row]++;
            has_begun = true;
        }
    }
    found = Py_BuildValue("(nO)", left, has_begun ? Py_True : Py_False);
done:
    while (num_open > 0)
        PyBuffer_Release(&views[--num_open]);
    return found;
}

static PyMethodDef methods[] = {
    {"complete", (PyCFunction)(void (*)(void))complete, METH_FASTCALL, "Take in a step."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_completer},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"slipstream_core._native.SpanCompleter", sizeof(SpanCompleter), 0,
                           Py_TPFLAGS_DEFAULT, slots};

int add_span_completer(PyObject *module)
{
    pages_type = type_of("slipstream_ipc._native", "TokenPages");
    return pages_type == NULL || add_type(module, &spec) == NULL ? -1 : 0;
}
