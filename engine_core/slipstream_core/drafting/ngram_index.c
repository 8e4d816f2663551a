/* What followed a row's last tokens when they occurred before; see drafter.py.
 *
 * For each length n there is a table by hash of n tokens, of the position behind their last
 * occurrence. A token costs one look-up a length: the place where the tokens before it were looked
 * up, to foresee it, is where it is then noted.
 */
#include "module.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TOKENS = 32, LEAST_BITS = 6, MOST_BITS = 30 };

static const double FIRST_SCORE = 0.5, SMOOTHING = 0.125;

typedef struct {
    uint32_t *ids, *tables; /* tables: of each length, one behind the other */
    int64_t length, room;
    int bits;                     /* of a table: 2^bits places, at most half of them taken */
    int64_t places[MOST_TOKENS]; /* of the last tokens of each length; -1: there are fewer */
    int64_t match;                /* the position behind the longest earlier occurrence; 0: none */
    double score;                 /* share of right ones among the tokens foreseen, smoothed */
} History;

typedef struct {
    PyObject_HEAD
    int least, most; /* tokens that are looked up */
    Py_ssize_t num_rows;
    History **rows;
} NgramIndex;

static void drop(History *history)
{
    if (history != NULL) {
        free(history->ids);
        free(history->tables);
        free(history);
    }
}

static void dealloc(PyObject *object)
{
    NgramIndex *self = (NgramIndex *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t row = 0; row < self->num_rows; row++)
        drop(self->rows[row]);
    free(self->rows);
    type->tp_free(object);
    Py_DECREF(type);
}

/* NgramIndex(least, most) */
static PyObject *new_index(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    int least, most;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "NgramIndex: no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "ii", &least, &most))
        return NULL;
    if (least < 1 || most < least || most > MOST_TOKENS) {
        PyErr_Format(PyExc_ValueError, "NgramIndex: %d to %d tokens, allowed: 1 to %d", least, most,
                     MOST_TOKENS);
        return NULL;
    }
    NgramIndex *self = (NgramIndex *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->least = least, self->most = most;
    return (PyObject *)self;
}

/* The place of the `num` tokens in front of position `at`: where they are, or would be noted. */
static int64_t place_of(const History *history, uint32_t *table, int num, int64_t at)
{
    const uint32_t *tokens = history->ids + at - num;
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < num; i++) {
        hash = (hash ^ tokens[i]) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    const int64_t mask = ((int64_t)1 << history->bits) - 1;
    int64_t place = (int64_t)(hash & (uint64_t)mask);
    while (table[place] != 0 &&
           memcmp(history->ids + table[place] - num, tokens, sizeof *tokens * (size_t)num) != 0)
        place = (place + 1) & mask;
    return place;
}

static uint32_t *table_of(const NgramIndex *self, const History *history, int num)
{
    return history->tables + ((int64_t)(num - self->least) << history->bits);
}

/* Looks up the last tokens. */
static void foresee(const NgramIndex *self, History *history)
{
    history->match = 0;
    for (int num = self->most; num >= self->least; num--) {
        int64_t *place = &history->places[num - self->least];
        *place = -1;
        if (history->length < num)
            continue;
        uint32_t *table = table_of(self, history, num);
        *place = place_of(history, table, num, history->length);
        if (history->match == 0)
            history->match = table[*place];
    }
}

/* Makes room for `more` tokens; false without memory. */
static bool make_room(const NgramIndex *self, History *history, int64_t more)
{
    const int64_t wanted = history->length + more;
    if (wanted > history->room) {
        int64_t room = history->room ? history->room : 64;
        while (room < wanted)
            room *= 2;
        uint32_t *ids = realloc(history->ids, sizeof *ids * (size_t)room);
        if (ids == NULL)
            return false;
        history->ids = ids, history->room = room;
    }
    int bits = history->bits ? history->bits : LEAST_BITS;
    while (bits < MOST_BITS && ((int64_t)1 << bits) < 2 * wanted)
        bits++;
    if (((int64_t)1 << bits) < 2 * wanted)
        return false;
    if (bits == history->bits)
        return true;
    const size_t places = (size_t)(self->most - self->least + 1) << bits;
    uint32_t *tables = calloc(places, sizeof *tables);
    if (tables == NULL)
        return false;
    free(history->tables);
    history->tables = tables, history->bits = bits;
    for (int num = self->least; num <= self->most; num++) {
        uint32_t *table = table_of(self, history, num);
        for (int64_t at = num; at < history->length; at++)
            table[place_of(history, table, num, at)] = (uint32_t)at;
    }
    foresee(self, history);
    return true;
}

static void append(const NgramIndex *self, History *history, uint32_t id, bool counts)
{
    if (counts && history->match != 0) {
        const double is_right = history->ids[history->match] == id;
        history->score += SMOOTHING * (is_right - history->score);
    }
    for (int num = self->least; num <= self->most; num++) {
        const int64_t place = history->places[num - self->least];
        if (place >= 0)
            table_of(self, history, num)[place] = (uint32_t)history->length;
    }
    history->ids[history->length++] = id;
    foresee(self, history);
}

static History *of_row(const NgramIndex *self, int64_t row)
{
    return row >= 0 && row < self->num_rows ? self->rows[row] : NULL;
}

/* open(row): an empty history. */
static PyObject *open_row(PyObject *object, PyObject *arg)
{
    NgramIndex *self = (NgramIndex *)object;
    const Py_ssize_t row = PyLong_AsSsize_t(arg);
    if (row < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "open: a row below 0");
        return NULL;
    }
    if (row >= self->num_rows) {
        Py_ssize_t num = self->num_rows ? self->num_rows : 64;
        while (num <= row)
            num *= 2;
        History **rows = realloc(self->rows, sizeof *rows * (size_t)num);
        if (rows == NULL)
            return PyErr_NoMemory();
        memset(rows + self->num_rows, 0, sizeof *rows * (size_t)(num - self->num_rows));
        self->rows = rows, self->num_rows = num;
    }
    History *history = calloc(1, sizeof *history);
    if (history == NULL)
        return PyErr_NoMemory();
    history->score = FIRST_SCORE;
    for (int at = 0; at < MOST_TOKENS; at++)
        history->places[at] = -1;
    drop(self->rows[row]);
    self->rows[row] = history;
    Py_RETURN_NONE;
}

/* close(row): forget it; nothing where it is not open. */
static PyObject *close_row(PyObject *object, PyObject *arg)
{
    NgramIndex *self = (NgramIndex *)object;
    const Py_ssize_t row = PyLong_AsSsize_t(arg);
    if (row == -1 && PyErr_Occurred())
        return NULL;
    if (of_row(self, row) != NULL) {
        drop(self->rows[row]);
        self->rows[row] = NULL;
    }
    Py_RETURN_NONE;
}

static bool open_views(PyObject *const *args, Py_ssize_t num, int writable_from, Py_buffer *views)
{
    for (Py_ssize_t at = 0; at < num; at++)
        if (PyObject_GetBuffer(args[at], &views[at],
                               at < writable_from ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) {
            while (at > 0)
                PyBuffer_Release(&views[--at]);
            return false;
        }
    return true;
}

static PyObject *with_views_closed(PyObject *result, Py_buffer *views, int num)
{
    while (num > 0)
        PyBuffer_Release(&views[--num]);
    return result;
}

/* append(rows, counts, ids, is_sampled): see _native.pyi. */
static PyObject *append_ids(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const NgramIndex *self = (NgramIndex *)object;
    Py_buffer views[3];
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "append: expected 4 arguments");
        return NULL;
    }
    const int is_sampled = PyObject_IsTrue(args[3]);
    if (is_sampled < 0 || !open_views(args, 3, 3, views))
        return NULL;
    const int64_t *rows = views[0].buf, *counts = views[1].buf;
    const uint32_t *ids = views[2].buf;
    const Py_ssize_t num = views[0].len / 8;
    int64_t left = views[2].len / 4;
    bool fits = views[1].len == views[0].len;
    for (Py_ssize_t at = 0; fits && at < num; at++) {
        fits = counts[at] >= 0 && counts[at] <= left;
        left -= fits ? counts[at] : 0;
    }
    if (!fits || left != 0) {
        PyErr_SetString(PyExc_ValueError, "append: ids that do not fit the counts");
        return with_views_closed(NULL, views, 3);
    }
    for (Py_ssize_t at = 0; at < num; ids += counts[at++]) {
        History *history = of_row(self, rows[at]);
        if (history == NULL)
            continue;
        if (!make_room(self, history, counts[at])) {
            PyErr_NoMemory();
            return with_views_closed(NULL, views, 3);
        }
        for (int64_t i = 0; i < counts[at]; i++)
            append(self, history, ids[i], is_sampled);
    }
    return with_views_closed(Py_NewRef(Py_None), views, 3);
}

/* scores(rows, out) -> how many have a match: see _native.pyi. */
static PyObject *scores(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const NgramIndex *self = (NgramIndex *)object;
    Py_buffer views[2];
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "scores: expected 2 arguments");
        return NULL;
    }
    if (!open_views(args, 2, 1, views))
        return NULL;
    const int64_t *rows = views[0].buf;
    double *out = views[1].buf;
    if (views[1].len != views[0].len) {
        PyErr_SetString(PyExc_ValueError, "scores: columns of different lengths");
        return with_views_closed(NULL, views, 2);
    }
    Py_ssize_t found = 0;
    for (Py_ssize_t at = 0; at < views[0].len / 8; at++) {
        const History *history = of_row(self, rows[at]);
        const bool has_match = history != NULL && history->match != 0;
        out[at] = has_match ? history->score : 0;
        found += has_match;
    }
    return with_views_closed(PyLong_FromSsize_t(found), views, 2);
}

/* draft(rows, counts, out): see _native.pyi. */
static PyObject *draft(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const NgramIndex *self = (NgramIndex *)object;
    Py_buffer views[3];
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "draft: expected 3 arguments");
        return NULL;
    }
    if (!open_views(args, 3, 2, views))
        return NULL;
    const int64_t *rows = views[0].buf, *counts = views[1].buf;
    int64_t *out = views[2].buf, left = views[2].len / 8;
    bool fits = views[1].len == views[0].len;
    for (Py_ssize_t at = 0; fits && at < views[0].len / 8; at++) {
        const History *history = of_row(self, rows[at]);
        fits = counts[at] >= 0 && counts[at] <= left &&
               (counts[at] == 0 || (history != NULL && history->match != 0));
        if (!fits)
            break;
        for (int64_t i = 0; i < counts[at]; i++) {
            const int64_t from = history->match + i;
            out[i] = from < history->length ? history->ids[from] : out[from - history->length];
        }
        out += counts[at], left -= counts[at];
    }
    if (!fits || left != 0) {
        PyErr_SetString(PyExc_ValueError, "draft: counts that do not fit what is found");
        return with_views_closed(NULL, views, 3);
    }
    return with_views_closed(Py_NewRef(Py_None), views, 3);
}

static PyMethodDef methods[] = {
    {"open", open_row, METH_O, "Begin a row's history."},
    {"close", close_row, METH_O, "Forget a row."},
    {"append", (PyCFunction)(void (*)(void))append_ids, METH_FASTCALL, "Take in tokens of rows."},
    {"scores", (PyCFunction)(void (*)(void))scores, METH_FASTCALL, "How far rows are foreseen."},
    {"draft", (PyCFunction)(void (*)(void))draft, METH_FASTCALL, "What may follow."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_index},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"slipstream_core._native.NgramIndex", sizeof(NgramIndex), 0,
                           Py_TPFLAGS_DEFAULT, slots};

int add_ngram_index(PyObject *module)
{
    return add_type(module, &spec) == NULL ? -1 : 0;
}
