/* tails(ids, numbers, widths, text, starts, sizes, lengths) -> (tails, ends, lengths), or a list of
 * the ids that the columns do not have: see `logprob_encoding.CompletionTails`.
 *
 * widths: u32, the number of candidates of each token; one without any has an empty tail. ids: u32,
 * those of all candidates, each token's own first. numbers: their log-probabilities as a JSON list.
 * text, starts, sizes, lengths: `vocabulary.TokenKeys`. A tail is the end of a completion's
 * log-probabilities, behind the `text_offset`; tails lie one behind the other.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VALUES "],\"token_logprobs\":["
#define NAMES "],\"tokens\":["
#define TOPS "],\"top_logprobs\":[{"
#define END "}]}"
#define SIZE_OF(text) ((Py_ssize_t)sizeof(text) - 1)
#define FIXED (SIZE_OF(VALUES) + SIZE_OF(NAMES) + SIZE_OF(TOPS) + SIZE_OF(END))

typedef struct {
    const char *text;
    Py_ssize_t size;
} Piece;

typedef struct {
    const char *text;
    Py_ssize_t text_size, num;
    const uint32_t *starts, *sizes;
    const int32_t *lengths;
} Keys;

static uint32_t u32_at(const Py_buffer *column, Py_ssize_t at) {
    uint32_t value;
    memcpy(&value, (const char *)column->buf + 4 * at, sizeof(value));
    return value;
}

static char *copied(char *to, const char *from, Py_ssize_t size) {
    memcpy(to, from, (size_t)size);
    return to + size;
}

/* The next number of a JSON list, whose bytes `*from` up to `end` are; -1 if there is none. */
static int next_number(const char **from, const char *end, Piece *found) {
    if (*from >= end)
        return -1;
    const char *comma = memchr(*from, ',', (size_t)(end - *from));
    const char *behind = comma ? comma : end;
    found->text = *from;
    found->size = behind - *from;
    *from = behind + 1;
    return 0;
}

static int is_known(const Keys *keys, uint32_t token_id) {
    return token_id < keys->num && keys->sizes[token_id];
}

/* The key of a known token; its size is 0 where the columns do not match. */
static Piece key_of(const Keys *keys, uint32_t token_id) {
    Piece key = {keys->text + keys->starts[token_id], keys->sizes[token_id]};
    if (key.size < 2 || (Py_ssize_t)keys->starts[token_id] + key.size > keys->text_size)
        key.size = 0;
    return key;
}

/* Whether candidate `at` of those from `first` has the name of one before it. */
static int is_repeated(const Py_buffer *ids, Py_ssize_t first, Py_ssize_t at,
                       const uint32_t *starts) {
    uint32_t start = starts[u32_at(ids, first + at)];
    for (Py_ssize_t before = 0; before < at; before++)
        if (starts[u32_at(ids, first + before)] == start)
            return 1;
    return 0;
}

static PyObject *unknown_ids(const Py_buffer *ids, const Keys *keys) {
    PyObject *unknown = PyList_New(0);
    for (Py_ssize_t at = 0; unknown && at < ids->len / 4; at++) {
        if (is_known(keys, u32_at(ids, at)))
            continue;
        PyObject *token_id = PyLong_FromUnsignedLong(u32_at(ids, at));
        if (!token_id || PyList_Append(unknown, token_id) < 0)
            Py_CLEAR(unknown);
        Py_XDECREF(token_id);
    }
    return unknown;
}

/* Writes the tails, for which there is room; their size, or -1 with an exception. */
static Py_ssize_t write_tails(const Py_buffer *ids, const Py_buffer *numbers,
                              const Py_buffer *widths, const Keys *keys, char *tails, char *ends,
                              char *lengths) {
    const char *from = (const char *)numbers->buf + 1, *end = (const char *)numbers->buf + numbers->len - 1;
    Py_ssize_t num = widths->len / 4, first = 0;
    char *to = tails;
    for (Py_ssize_t token = 0; token < num; token++) {
        uint32_t behind = (uint32_t)(to - tails);
        memcpy(ends + 4 * token, &behind, sizeof(behind));
        memset(lengths + 4 * token, 0, sizeof(int32_t));
        Py_ssize_t width = u32_at(widths, token);
        if (!width)
            continue;
        uint32_t own = u32_at(ids, first);
        Piece key = key_of(keys, own), number;
        if (!key.size || next_number(&from, end, &number) < 0)
            goto wrong;
        to = copied(to, VALUES, SIZE_OF(VALUES));
        to = copied(to, number.text, number.size);
        to = copied(to, NAMES, SIZE_OF(NAMES));
        to = copied(to, key.text + 1, key.size - 2); /* without comma and colon */
        to = copied(to, TOPS, SIZE_OF(TOPS));
        to = copied(to, key.text + 1, key.size - 1); /* the first has no comma */
        to = copied(to, number.text, number.size);
        for (Py_ssize_t at = 1; at < width; at++) {
            uint32_t token_id = u32_at(ids, first + at);
            key = key_of(keys, token_id);
            if (!key.size || next_number(&from, end, &number) < 0)
                goto wrong;
            if (is_repeated(ids, first, at, keys->starts))
                continue;
            to = copied(to, key.text, key.size);
            to = copied(to, number.text, number.size);
        }
        to = copied(to, END, SIZE_OF(END));
        first += width;
        behind = (uint32_t)(to - tails);
        memcpy(ends + 4 * token, &behind, sizeof(behind));
        memcpy(lengths + 4 * token, &keys->lengths[own], sizeof(int32_t));
    }
    return to - tails;
wrong:
    PyErr_SetString(PyExc_ValueError, "tails: fewer numbers than ids, or a wrong key");
    return -1;
}

/* Room for all tails: -1 for an unknown id, -2 where the widths are not those of all ids. */
static Py_ssize_t room_for(const Py_buffer *ids, const Py_buffer *numbers, const Py_buffer *widths,
                           const Keys *keys) {
    Py_ssize_t num = widths->len / 4, first = 0, num_ids = ids->len / 4;
    Py_ssize_t most = num * FIXED + 2 * numbers->len; /* each token's own number is there twice */
    for (Py_ssize_t token = 0; token < num; token++) {
        Py_ssize_t width = u32_at(widths, token);
        if (width > num_ids - first)
            return -2;
        for (Py_ssize_t at = 0; at < width; at++) {
            uint32_t token_id = u32_at(ids, first + at);
            if (!is_known(keys, token_id))
                return -1;
            most += (Py_ssize_t)keys->sizes[token_id] * (at ? 1 : 2);
        }
        first += width;
    }
    return first == num_ids ? most : -2;
}

static PyObject *all_tails(const Py_buffer *ids, const Py_buffer *numbers, const Py_buffer *widths,
                           const Keys *keys) {
    const char *text = numbers->buf;
    Py_ssize_t num = widths->len / 4, most = -2;
    if (ids->len % 4 == 0 && widths->len % 4 == 0 && numbers->len >= 2 && *text == '[' &&
        text[numbers->len - 1] == ']')
        most = room_for(ids, numbers, widths, keys);
    if (most == -1)
        return unknown_ids(ids, keys);
    if (most < 0) {
        PyErr_SetString(PyExc_ValueError, "tails: columns that do not match");
        return NULL;
    }
    if (most > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "tails: too many bytes");
        return NULL;
    }
    PyObject *tails = PyBytes_FromStringAndSize(NULL, most), *result = NULL;
    PyObject *ends = PyBytes_FromStringAndSize(NULL, 4 * num);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * num);
    if (tails && ends && lengths) {
        Py_ssize_t size = write_tails(ids, numbers, widths, keys, PyBytes_AS_STRING(tails),
                                      PyBytes_AS_STRING(ends), PyBytes_AS_STRING(lengths));
        if (size >= 0 && _PyBytes_Resize(&tails, size) == 0)
            result = PyTuple_Pack(3, tails, ends, lengths);
    }
    Py_XDECREF(lengths);
    Py_XDECREF(ends);
    Py_XDECREF(tails);
    return result;
}

static PyObject *tails(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 7) {
        PyErr_SetString(PyExc_TypeError, "tails: expected 7 arguments");
        return NULL;
    }
    Py_buffer columns[7]; /* the arguments */
    int num = 0;
    PyObject *found = NULL;
    for (; num < 7; num++)
        if (PyObject_GetBuffer(args[num], &columns[num], PyBUF_SIMPLE) < 0)
            break;
    if (num == 7) {
        const Py_buffer *starts = &columns[4], *sizes = &columns[5], *lengths = &columns[6];
        if (starts->len % 4 || sizes->len != starts->len || lengths->len != starts->len) {
            PyErr_SetString(PyExc_ValueError, "tails: columns of different lengths");
        } else {
            Keys keys = {columns[3].buf, columns[3].len, starts->len / 4,
                         starts->buf,    sizes->buf,     lengths->buf};
            found = all_tails(&columns[0], &columns[1], &columns[2], &keys);
        }
    }
    while (num)
        PyBuffer_Release(&columns[--num]);
    return found;
}

static PyMethodDef methods[] = {
    {"tails", (PyCFunction)(void (*)(void))tails, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "logprob_tails", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_logprob_tails(void) { return PyModule_Create(&module); }
