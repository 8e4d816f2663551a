/* completion_tails(ids, numbers, widths, ranks, text, starts, sizes, lengths) -> (tails, ends,
 * lengths), or a list of the ids that the columns do not have: see `logprob_encoding.Tails`.
 * chat_tails: the same of chats.
 *
 * widths: u32, the number of candidates of each token; one without any has an empty tail. ids: u32,
 * those of all candidates, each token's own first. numbers: their log-probabilities as a JSON list.
 * ranks: u32, of the tokens with candidates. text, starts, sizes, lengths:
 * `vocabulary.TokenTextColumns`, of keys or of a chat's heads.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

#define VALUES "],\"token_logprobs\":["
#define NAMES "],\"tokens\":["
#define TOPS "],\"top_logprobs\":[{"
#define END "}]}"
#define CHAT "{\"content\":["
#define CHAT_TOPS ",\"top_logprobs\":["
#define CHAT_END "]}],\"refusal\":null}"
#define SIZE_OF(text) ((Py_ssize_t)sizeof(text) - 1)
/* of a token's tail what is always there, of either kind; a chat's candidate has two bytes more */
#define FIXED (SIZE_OF(VALUES) + SIZE_OF(NAMES) + SIZE_OF(TOPS) + SIZE_OF(END))

#define MOST_COMPARED 64 /* candidates of a token, each of which is compared with all before it */

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

/* The text of a known token; its size is 0 where the columns do not match. */
static Piece text_of(const Keys *keys, uint32_t token_id) {
    Piece text = {keys->text + keys->starts[token_id], keys->sizes[token_id]};
    if (text.size < 2 || (Py_ssize_t)keys->starts[token_id] + text.size > keys->text_size)
        text.size = 0;
    return text;
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

/* The candidates of one token, and the numbers from its own on. */
typedef struct {
    const Py_buffer *ids;
    Py_ssize_t first, width;
    uint32_t rank;
    const char *from, *end;
} Token;

/* The text and the number of the token's candidate `at`, which is the next one; -1 if a column does
 * not match. */
static int next_candidate(Token *token, Py_ssize_t at, const Keys *keys, Piece *text,
                          Piece *number) {
    *text = text_of(keys, u32_at(token->ids, token->first + at));
    return text->size ? next_number(&token->from, token->end, number) : -1;
}

/* Passes over a token with more candidates than are compared. */
static char *completion_tail(char *to, Token *token, const Keys *keys) {
    Piece key, number;
    for (Py_ssize_t at = 0; token->width > MOST_COMPARED && at < token->width; at++)
        if (next_number(&token->from, token->end, &number) < 0)
            return NULL;
    if (token->width > MOST_COMPARED)
        return to;
    if (next_candidate(token, 0, keys, &key, &number) < 0)
        return NULL;
    to = copied(to, VALUES, SIZE_OF(VALUES));
    to = copied(to, number.text, number.size);
    to = copied(to, NAMES, SIZE_OF(NAMES));
    to = copied(to, key.text + 1, key.size - 2); /* without comma and colon */
    to = copied(to, TOPS, SIZE_OF(TOPS));
    to = copied(to, key.text + 1, key.size - 1); /* the first has no comma */
    to = copied(to, number.text, number.size);
    for (Py_ssize_t at = 1; at < token->width; at++) {
        if (next_candidate(token, at, keys, &key, &number) < 0)
            return NULL;
        if (is_repeated(token->ids, token->first, at, keys->starts))
            continue;
        to = copied(to, key.text, key.size);
        to = copied(to, number.text, number.size);
    }
    return copied(to, END, SIZE_OF(END));
}

/* Whether the token is none of the likeliest, and as likely as the last one of them. */
static int is_tied(const Token *token) {
    uint32_t own = u32_at(token->ids, token->first);
    if (token->rank >= token->width)
        return 0;
    for (Py_ssize_t at = 1; at < token->width; at++)
        if (u32_at(token->ids, token->first + at) == own)
            return 0;
    return 1;
}

static char *chat_tail(char *to, Token *token, const Keys *keys) {
    Piece head, number;
    char *begin = to;
    for (Py_ssize_t at = 0; at < token->width; at++) {
        if (next_candidate(token, at, keys, &head, &number) < 0)
            return NULL;
        if (!at)
            to = copied(to, CHAT, SIZE_OF(CHAT));
        else if (at > 1)
            *to++ = ',';
        to = copied(to, head.text, head.size);
        to = copied(to, number.text, number.size);
        if (at)
            *to++ = '}';
        else
            to = copied(to, CHAT_TOPS, SIZE_OF(CHAT_TOPS));
    }
    return is_tied(token) ? begin : copied(to, CHAT_END, SIZE_OF(CHAT_END));
}

typedef char *(*TailWriter)(char *to, Token *token, const Keys *keys);

/* Writes the tails, for which there is room; their size, or -1 with an exception. */
static Py_ssize_t write_tails(const Py_buffer *columns, TailWriter write, const Keys *keys,
                              char *tails, char *ends, char *lengths) {
    const Py_buffer *numbers = &columns[1], *widths = &columns[2], *ranks = &columns[3];
    const char *from = numbers->buf;
    Token token = {&columns[0], 0, 0, 0, from + 1, from + numbers->len - 1};
    Py_ssize_t num = widths->len / 4, num_ranked = 0;
    char *to = tails;
    for (Py_ssize_t at = 0; at < num; at++, token.first += token.width) {
        int32_t length = 0;
        token.width = u32_at(widths, at);
        if (token.width) {
            if (num_ranked >= ranks->len / 4)
                goto wrong;
            token.rank = u32_at(ranks, num_ranked++);
            length = keys->lengths[u32_at(token.ids, token.first)];
            if (!(to = write(to, &token, keys)))
                goto wrong;
        }
        uint32_t behind = (uint32_t)(to - tails);
        memcpy(ends + 4 * at, &behind, sizeof(behind));
        memcpy(lengths + 4 * at, &length, sizeof(length));
    }
    return to - tails;
wrong:
    PyErr_SetString(PyExc_ValueError, "tails: fewer numbers or ranks than ids, or a wrong text");
    return -1;
}

/* Room for all tails: -1 for an unknown id, -2 where the widths are not those of all ids. */
static Py_ssize_t room_for(const Py_buffer *ids, const Py_buffer *numbers, const Py_buffer *widths,
                           const Keys *keys) {
    Py_ssize_t num = widths->len / 4, first = 0, num_ids = ids->len / 4;
    Py_ssize_t most = num * FIXED + 2 * (numbers->len + num_ids); /* own numbers are there twice */
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

static PyObject *all_tails(const Py_buffer *columns, TailWriter write, const Keys *keys) {
    const Py_buffer *ids = &columns[0], *numbers = &columns[1], *widths = &columns[2];
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
        Py_ssize_t size = write_tails(columns, write, keys, PyBytes_AS_STRING(tails),
                                      PyBytes_AS_STRING(ends), PyBytes_AS_STRING(lengths));
        if (size >= 0 && _PyBytes_Resize(&tails, size) == 0)
            result = PyTuple_Pack(3, tails, ends, lengths);
    }
    Py_XDECREF(lengths);
    Py_XDECREF(ends);
    Py_XDECREF(tails);
    return result;
}

#define NUM_COLUMNS 8 /* the arguments */

static PyObject *tails_of(PyObject *const *args, Py_ssize_t num_args, TailWriter write) {
    if (num_args != NUM_COLUMNS) {
        PyErr_SetString(PyExc_TypeError, "tails: expected 8 arguments");
        return NULL;
    }
    Py_buffer columns[NUM_COLUMNS];
    int num = 0;
    PyObject *found = NULL;
    for (; num < NUM_COLUMNS; num++)
        if (PyObject_GetBuffer(args[num], &columns[num], PyBUF_SIMPLE) < 0)
            break;
    if (num == NUM_COLUMNS) {
        const Py_buffer *starts = &columns[5], *sizes = &columns[6], *lengths = &columns[7];
        if (starts->len % 4 || sizes->len != starts->len || lengths->len != starts->len) {
            PyErr_SetString(PyExc_ValueError, "tails: columns of different lengths");
        } else {
            Keys keys = {columns[4].buf, columns[4].len, starts->len / 4,
                         starts->buf,    sizes->buf,     lengths->buf};
            found = all_tails(columns, write, &keys);
        }
    }
    while (num)
        PyBuffer_Release(&columns[--num]);
    return found;
}

static PyObject *completion_tails(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return tails_of(args, num_args, completion_tail);
}

static PyObject *chat_tails(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return tails_of(args, num_args, chat_tail);
}

static PyMethodDef methods[] = {
    {"completion_tails", (PyCFunction)(void (*)(void))completion_tails, METH_FASTCALL, NULL},
    {"chat_tails", (PyCFunction)(void (*)(void))chat_tails, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_logprob_tails(PyObject *module) { return PyModule_AddFunctions(module, methods); }
