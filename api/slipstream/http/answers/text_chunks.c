/* write_texts(streams, texts, tails, chats, kinds, token_ids, counts, ends, lengths, chat_ends, left):
 * what `broadcast` does entry by entry in Python, for entries that are plain text, or that and the
 * log-probabilities of one token, and whose connections have room.
 *
 * tails, ends, lengths: `logprob_encoding.Tails` of completions; None and empty without. chats,
 * chat_ends: those of chats.
 * left: a writable byte for each entry. An entry whose byte is not 0 is passed over; the byte of an
 * entry that Python has to write is set. Nothing has been done for such an entry.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

#define MAX_ESCAPED 6 /* bytes to a character of a JSON string */
#define MAX_HEAD 20   /* the size of an HTTP chunk in hexadecimal, and a line break */

static PyObject *s_exchange, *s_is_ready, *s_deltas, *s_is_text_only, *s_before, *s_after, *s_send,
    *s_frames, *s_cursor, *s_num_chars, *s_num_tokens, *s_checksum, *s_prefix, *s_repeat,
    *s_on_exception, *s_counters, *s_num_chunks, *s_position, *s_between, *s_offset, *s_pending,
    *s_numbers, *s_after_number, *s_grow, *s_texts;
static uint32_t crc_table[256];

/* ---- attributes --------------------------------------------------------------------------
 *
 * None may be looked up while an exception is set: a look-up may clear it.
 */

/* 1 or 0, or -1 with an exception. */
static int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value)
        return -1;
    int found = PyObject_IsTrue(value);
    Py_DECREF(value);
    return found;
}

static PyObject *bytes_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value && !PyBytes_CheckExact(value)) {
        PyErr_Format(PyExc_TypeError, "%U: expected bytes", name);
        Py_CLEAR(value);
    }
    return value;
}

static int number_of(PyObject *object, PyObject *name, unsigned long long *found) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value)
        return -1;
    *found = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *found == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

static int set_number(PyObject *object, PyObject *name, unsigned long long number) {
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    if (!value)
        return -1;
    int failed = PyObject_SetAttr(object, name, value);
    Py_DECREF(value);
    return failed;
}

/* ---- text -------------------------------------------------------------------------------- */

static char *escaped(char *to, Py_UCS4 value) {
    static const char digits[] = "0123456789abcdef";
    *to++ = '\\';
    *to++ = 'u';
    for (int shift = 12; shift >= 0; shift -= 4)
        *to++ = digits[value >> shift & 15];
    return to;
}

/* Writes a text as JSON without quotes, as `response_encoding.json_part` does: in one line. NULL for
 * a text that UTF-8 has no form for. `to` has MAX_ESCAPED bytes for each character.
 */
static char *json_part(char *to, PyObject *text) {
    Py_ssize_t num = PyUnicode_GET_LENGTH(text);
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t at = 0; at < num; at++) {
        Py_UCS4 value = PyUnicode_READ(kind, data, at);
        if (value == '"' || value == '\\') {
            *to++ = '\\';
            *to++ = (char)value;
        } else if (value >= 0x20 && value < 0x80) {
            *to++ = (char)value;
        } else if (value < 0x20) {
            static const char shorts[] = "\0\0\0\0\0\0\0\0btn\0fr";
            char letter = value < sizeof(shorts) - 1 ? shorts[value] : 0;
            if (letter) {
                *to++ = '\\';
                *to++ = letter;
            } else {
                to = escaped(to, value);
            }
        } else if (value == 0x85 || value == 0x2028 || value == 0x2029) {
            to = escaped(to, value);
        } else if (value < 0x800) {
            *to++ = (char)(0xC0 | value >> 6);
            *to++ = (char)(0x80 | (value & 63));
        } else if (value < 0x10000) {
            if (value >= 0xD800 && value < 0xE000)
                return NULL;
            *to++ = (char)(0xE0 | value >> 12);
            *to++ = (char)(0x80 | (value >> 6 & 63));
            *to++ = (char)(0x80 | (value & 63));
        } else {
            *to++ = (char)(0xF0 | value >> 18);
            *to++ = (char)(0x80 | (value >> 12 & 63));
            *to++ = (char)(0x80 | (value >> 6 & 63));
            *to++ = (char)(0x80 | (value & 63));
        }
    }
    return to;
}

static char *decimal(char *to, unsigned long long value) {
    char digits[20];
    int num = 0;
    do
        digits[num++] = (char)('0' + value % 10);
    while (value /= 10);
    while (num)
        *to++ = digits[--num];
    return to;
}

static char *copied(char *to, const char *from, Py_ssize_t size) {
    memcpy(to, from, (size_t)size);
    return to + size;
}

static char *copied_bytes(char *to, PyObject *bytes) {
    return copied(to, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
}

typedef struct {
    const char *text;
    Py_ssize_t size;
} Piece;

static Piece piece_of(PyObject *bytes) {
    Piece piece = {PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)};
    return piece;
}

/* A bytes object of an HTTP chunk of the pieces, the last of which ends it with a line break. */
static PyObject *chunk_of(const Piece *pieces, int num) {
    Py_ssize_t size = 0;
    for (int at = 0; at < num; at++)
        size += pieces[at].size;
    static const char digits[] = "0123456789abcdef";
    char head[MAX_HEAD], *from = head + MAX_HEAD;
    *--from = '\n';
    *--from = '\r';
    for (Py_ssize_t rest = size - 2, first = 1; first || rest; rest >>= 4, first = 0)
        *--from = digits[rest & 15];
    Py_ssize_t head_size = head + MAX_HEAD - from;
    PyObject *chunk = PyBytes_FromStringAndSize(NULL, head_size + size);
    if (!chunk)
        return NULL;
    char *to = copied(PyBytes_AS_STRING(chunk), from, head_size);
    for (int at = 0; at < num; at++)
        to = copied(to, pieces[at].text, pieces[at].size);
    return chunk;
}

/* ---- one entry --------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *token_ids; /* u32, those of the entry */
    Py_ssize_t num_tokens;
    uint32_t kind;
    Piece tail, chat; /* text: NULL without log-probabilities */
    int32_t length;
    char *part; /* room for the text as JSON */
    Py_ssize_t room;
} Entry;

/* Moves the cursor past the entry; returns the `id:` line, or NULL with an exception. */
static PyObject *advance(PyObject *cursor, const Entry *entry, PyObject *text) {
    unsigned long long chars, tokens, checksum;
    if (number_of(cursor, s_num_chars, &chars) < 0 || number_of(cursor, s_num_tokens, &tokens) < 0 ||
        number_of(cursor, s_checksum, &checksum) < 0)
        return NULL;
    chars += (unsigned long long)PyUnicode_GET_LENGTH(text);
    tokens += (unsigned long long)entry->num_tokens;
    uint32_t crc = ~(uint32_t)checksum;
    for (Py_ssize_t at = 0; at < 4 * entry->num_tokens; at++)
        crc = crc_table[(crc ^ entry->token_ids[at]) & 0xFF] ^ crc >> 8;
    checksum = (uint32_t)~crc;
    PyObject *prefix = bytes_of(cursor, s_prefix);
    if (!prefix)
        return NULL;
    char numbers[3 * 21];
    char *to = decimal(numbers, chars);
    *to++ = '.';
    to = decimal(to, tokens);
    *to++ = '.';
    to = decimal(to, checksum);
    *to++ = '\n';
    Py_ssize_t size = to - numbers;
    PyObject *line = PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(prefix) + size);
    if (line)
        copied(copied_bytes(PyBytes_AS_STRING(line), prefix), numbers, size);
    Py_DECREF(prefix);
    if (line && (set_number(cursor, s_num_chars, chars) < 0 ||
                 set_number(cursor, s_num_tokens, tokens) < 0 ||
                 set_number(cursor, s_checksum, checksum) < 0))
        Py_CLEAR(line);
    return line;
}

/* The stream's frame for a kind of text: itself for 0; NULL without an exception if there is none. */
static PyObject *frame_of(PyObject *stream, uint32_t kind) {
    if (!kind)
        return Py_NewRef(stream);
    PyObject *frames = PyObject_GetAttr(stream, s_frames);
    PyObject *key = frames ? PyLong_FromUnsignedLong(kind) : NULL;
    PyObject *frame = NULL;
    if (key && PyDict_CheckExact(frames))
        frame = Py_XNewRef(PyDict_GetItemWithError(frames, key));
    Py_XDECREF(key);
    Py_XDECREF(frames);
    return frame;
}

/* Sends a chunk of the pieces; -1 with an exception. */
static int send_chunk(PyObject *exchange, const Piece *pieces, int num) {
    if (pieces[num - 1].size < 2) {
        PyErr_SetString(PyExc_ValueError, "after: expected a line break at its end");
        return -1;
    }
    PyObject *chunk = chunk_of(pieces, num);
    PyObject *send = chunk ? PyObject_GetAttr(exchange, s_send) : NULL;
    PyObject *sent = send ? PyObject_CallOneArg(send, chunk) : NULL;
    Py_XDECREF(send);
    Py_XDECREF(chunk);
    Py_XDECREF(sent);
    return sent ? 0 : -1;
}

/* As `write_entry`, for a stream that shows a chat's log-probabilities. */
static int write_chat(PyObject *stream, PyObject *exchange, PyObject *text, Entry *entry) {
    char *end = entry->chat.text && !entry->kind ? json_part(entry->part, text) : NULL;
    if (!end || end == entry->part)
        return 0;
    int result = -1;
    PyObject *before = NULL, *between = NULL, *after = NULL;
    if (!(before = bytes_of(stream, s_before)) || !(between = bytes_of(stream, s_between)) ||
        !(after = bytes_of(stream, s_after)))
        goto done;
    Piece pieces[] = {
        piece_of(before), {entry->part, end - entry->part}, piece_of(between), entry->chat,
        piece_of(after),
    };
    if (send_chunk(exchange, pieces, sizeof(pieces) / sizeof(pieces[0])) == 0)
        result = 1;
done:
    Py_XDECREF(after);
    Py_XDECREF(between);
    Py_XDECREF(before);
    return result;
}

/* As `write_entry`, for a stream that shows log-probabilities. */
static int write_scored(PyObject *stream, PyObject *exchange, PyObject *text, Entry *entry) {
    PyObject *texts = PyObject_GetAttr(stream, s_texts);
    Py_XDECREF(texts); /* the stream has it */
    if (!texts || texts == Py_None)
        return texts ? 0 : -1;
    PyObject *position = PyObject_GetAttr(stream, s_position);
    if (position == Py_None) {
        Py_DECREF(position);
        return write_chat(stream, exchange, text, entry);
    }
    if (!position || !entry->tail.text || entry->kind || entry->length < 0) {
        Py_XDECREF(position);
        return position ? 0 : -1;
    }
    int result = -1;
    unsigned long long offset;
    PyObject *before = NULL, *between = NULL, *after = NULL, *pending = NULL;
    if (!(before = bytes_of(stream, s_before)) || !(between = bytes_of(stream, s_between)) ||
        !(after = bytes_of(stream, s_after)) || !(pending = bytes_of(position, s_pending)) ||
        number_of(position, s_offset, &offset) < 0)
        goto done;
    char *end = json_part(entry->part, text);
    if (PyBytes_GET_SIZE(pending) || !end || end == entry->part) {
        result = 0;
        goto done;
    }
    static const char begin[] = "{\"text_offset\":[";
    char number[20];
    Piece pieces[] = {
        piece_of(before),
        {entry->part, end - entry->part},
        piece_of(between),
        {begin, sizeof(begin) - 1},
        {number, decimal(number, offset) - number},
        entry->tail,
        piece_of(after),
    };
    if (set_number(position, s_offset, offset + (unsigned long long)entry->length) == 0 &&
        send_chunk(exchange, pieces, sizeof(pieces) / sizeof(pieces[0])) == 0)
        result = 1;
done:
    Py_XDECREF(pending);
    Py_XDECREF(after);
    Py_XDECREF(between);
    Py_XDECREF(before);
    Py_DECREF(position);
    return result;
}

/* Writes the number of a chunk that contains `text`; its end, or NULL with an exception. */
static char *chunk_number(char *to, PyObject *numbers, PyObject *text) {
    PyObject *value = PyObject_CallMethodOneArg(numbers, s_grow, text);
    if (!value)
        return NULL;
    unsigned long long number = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    if (number == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    return decimal(to, number);
}

/* 1: written, 2: there is nothing to write; 0: left to Python; -1 with an exception. */
static int write_entry(PyObject *stream, PyObject *exchange, PyObject *text, Entry *entry) {
    int found = is_true(exchange, s_is_ready);
    if (found <= 0)
        return found;
    if ((found = is_true(stream, s_deltas)))
        return found < 0 ? -1 : 0;
    if ((found = is_true(stream, s_is_text_only)) <= 0)
        return found < 0 ? -1 : write_scored(stream, exchange, text, entry);
    PyObject *frame = frame_of(stream, entry->kind);
    if (!frame)
        return PyErr_Occurred() ? -1 : 0;
    int result = -1;
    PyObject *before = NULL, *after = NULL, *repeat = NULL, *cursor = NULL, *after_number = NULL;
    PyObject *numbers = NULL, *line = NULL;
    if (!(before = bytes_of(frame, s_before)) || !(after = bytes_of(frame, s_after)) ||
        !(repeat = bytes_of(frame, s_repeat)) ||
        !(cursor = PyObject_GetAttr(stream, s_cursor)) ||
        !(after_number = bytes_of(frame, s_after_number)) ||
        !(numbers = PyObject_GetAttr(stream, s_numbers)))
        goto done;
    char *end = json_part(entry->part, text), number[20], *number_end = number;
    if (!end) {
        result = 0;
        goto done;
    }
    if (numbers != Py_None && end > entry->part &&
        !(number_end = chunk_number(number, numbers, text)))
        goto done;
    if (cursor != Py_None && !(line = advance(cursor, entry, text)))
        goto done;
    Piece part = {entry->part, end - entry->part}, pieces[8];
    int num = 0;
    if (line)
        pieces[num++] = piece_of(line);
    pieces[num++] = piece_of(before);
    if (numbers != Py_None) {
        Piece digits = {number, number_end - number};
        pieces[num++] = digits;
        pieces[num++] = piece_of(after_number);
    }
    pieces[num++] = part;
    if (PyBytes_GET_SIZE(repeat)) {
        pieces[num++] = piece_of(repeat);
        pieces[num++] = part;
    }
    pieces[num++] = piece_of(after);
    if (!part.size)
        result = 2;
    else if (send_chunk(exchange, pieces, num) == 0)
        result = 1;
done:
    Py_XDECREF(line);
    Py_XDECREF(numbers);
    Py_XDECREF(after_number);
    Py_XDECREF(cursor);
    Py_XDECREF(repeat);
    Py_XDECREF(after);
    Py_XDECREF(before);
    Py_DECREF(frame);
    return result;
}

/* Calls the stream's `on_exception` while the exception is handled. */
static int report(PyObject *stream) {
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback)
        PyException_SetTraceback(value, traceback);
    PyObject *before = PyErr_GetHandledException();
    PyErr_SetHandledException(value);
    PyObject *result = PyObject_CallMethodNoArgs(stream, s_on_exception);
    PyErr_SetHandledException(before);
    Py_XDECREF(before);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* ---- all entries ------------------------------------------------------------------------- */

static int count_chunks(PyObject *counters, unsigned long long num) {
    unsigned long long before;
    if (!counters || !num)
        return 0;
    if (number_of(counters, s_num_chunks, &before) < 0)
        return -1;
    return set_number(counters, s_num_chunks, before + num);
}

static uint32_t u32_at(const Py_buffer *column, Py_ssize_t at) {
    const uint8_t *bytes = (const uint8_t *)column->buf + 4 * at;
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

/* A token's own of all tails; its text is NULL where it is empty. -1 with an exception. */
static int tail_of(PyObject *tails, const Py_buffer *ends, Py_ssize_t token, Piece *found) {
    Py_ssize_t begin = token ? (Py_ssize_t)u32_at(ends, token - 1) : 0;
    Py_ssize_t end = (Py_ssize_t)u32_at(ends, token);
    if (end < begin || end > PyBytes_GET_SIZE(tails)) {
        PyErr_SetString(PyExc_ValueError, "ends: not in order, or behind the tails");
        return -1;
    }
    found->text = end > begin ? PyBytes_AS_STRING(tails) + begin : NULL;
    found->size = end - begin;
    return 0;
}

static PyObject *write_all(PyObject *streams, PyObject *texts, PyObject *tails, PyObject *chats,
                           const Py_buffer *columns) {
    const Py_buffer *kinds = &columns[0], *ids = &columns[1], *counts = &columns[2];
    const Py_buffer *ends = &columns[3], *lengths = &columns[4], *chat_ends = &columns[5];
    uint8_t *left = columns[6].buf;
    Py_ssize_t num = PyList_GET_SIZE(texts), first = 0;
    if (PyList_GET_SIZE(streams) != num || columns[6].len != num ||
        (tails && (ends->len != ids->len || lengths->len != ids->len)) ||
        (chats && chat_ends->len != ids->len) ||
        (kinds->len && kinds->len != 4 * num) || (counts->len && counts->len != 4 * num)) {
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
        return NULL;
    }
    PyObject *counters = NULL; /* of the last exchange */
    unsigned long long num_written = 0;
    Entry entry = {0};
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && at < num; at++, first += entry.num_tokens) {
        entry.num_tokens = counts->len ? (Py_ssize_t)u32_at(counts, at) : 1;
        if (entry.num_tokens > ids->len / 4 - first) {
            PyErr_SetString(PyExc_ValueError, "fewer token ids than counted");
            failed = -1;
            break;
        }
        if (left[at])
            continue;
        entry.tail.text = entry.chat.text = NULL;
        if (entry.num_tokens == 1) {
            if ((tails && tail_of(tails, ends, first, &entry.tail) < 0) ||
                (chats && tail_of(chats, chat_ends, first, &entry.chat) < 0)) {
                failed = -1;
                break;
            }
            if (tails)
                memcpy(&entry.length, (const char *)lengths->buf + 4 * first, sizeof(entry.length));
        }
        if (PyList_GET_SIZE(streams) != num || PyList_GET_SIZE(texts) != num) {
            PyErr_SetString(PyExc_RuntimeError, "the lists changed");
            failed = -1;
            break;
        }
        PyObject *stream = PyList_GET_ITEM(streams, at), *text = PyList_GET_ITEM(texts, at);
        if (!PyUnicode_Check(text)) {
            PyErr_SetString(PyExc_TypeError, "texts: expected str");
            failed = -1;
            break;
        }
        Py_ssize_t room = MAX_ESCAPED * PyUnicode_GET_LENGTH(text);
        if (room > entry.room) {
            char *part = PyMem_Realloc(entry.part, (size_t)room);
            if (!part) {
                PyErr_NoMemory();
                failed = -1;
                break;
            }
            entry.part = part;
            entry.room = room;
        }
        entry.kind = kinds->len ? u32_at(kinds, at) : 0;
        entry.token_ids = (const uint8_t *)ids->buf + 4 * first;
        Py_INCREF(stream);
        Py_INCREF(text);
        PyObject *exchange = PyObject_GetAttr(stream, s_exchange);
        int result = exchange ? write_entry(stream, exchange, text, &entry) : -1;
        if (result < 0)
            failed = report(stream);
        else if (!result)
            left[at] = 1;
        if (!failed && result == 1) {
            PyObject *own = PyObject_GetAttr(exchange, s_counters);
            if (own && own == counters) {
                Py_DECREF(own);
            } else {
                failed = own ? count_chunks(counters, num_written) : -1;
                Py_XDECREF(counters);
                counters = own;
                num_written = 0;
            }
            num_written++;
        }
        Py_XDECREF(exchange);
        Py_DECREF(text);
        Py_DECREF(stream);
    }
    if (!failed)
        failed = count_chunks(counters, num_written);
    Py_XDECREF(counters);
    PyMem_Free(entry.part);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *write_texts(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 11 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        (args[2] != Py_None && !PyBytes_CheckExact(args[2])) ||
        (args[3] != Py_None && !PyBytes_CheckExact(args[3]))) {
        PyErr_SetString(PyExc_TypeError,
                        "write_texts: expected two lists, two bytes and seven columns");
        return NULL;
    }
    Py_buffer columns[7];
    int num = 0;
    PyObject *result = NULL;
    for (; num < 7; num++)
        if (PyObject_GetBuffer(args[4 + num], &columns[num],
                               num == 6 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            break;
    if (num == 7)
        result = write_all(args[0], args[1], args[2] == Py_None ? NULL : args[2],
                           args[3] == Py_None ? NULL : args[3], columns);
    while (num)
        PyBuffer_Release(&columns[--num]);
    return result;
}

static PyMethodDef methods[] = {
    {"write_texts", (PyCFunction)(void (*)(void))write_texts, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_text_chunks(PyObject *module) {
    static const struct {
        PyObject **name;
        const char *spelled;
    } names[] = {
        {&s_exchange, "exchange"},     {&s_is_ready, "is_ready"},     {&s_deltas, "deltas"},
        {&s_is_text_only, "is_text_only"}, {&s_before, "before"},     {&s_after, "after"},
        {&s_send, "send"},             {&s_frames, "frames"},         {&s_cursor, "cursor"},
        {&s_num_chars, "num_chars"},   {&s_num_tokens, "num_tokens"}, {&s_checksum, "checksum"},
        {&s_prefix, "prefix"},         {&s_repeat, "repeat"},         {&s_counters, "counters"},
        {&s_on_exception, "on_exception"}, {&s_num_chunks, "num_chunks"},
        {&s_position, "position"},     {&s_between, "between"},       {&s_offset, "offset"},
        {&s_pending, "pending"},       {&s_numbers, "numbers"},
        {&s_after_number, "after_number"}, {&s_grow, "grow"},         {&s_texts, "texts"},
    };
    for (size_t at = 0; at < sizeof(names) / sizeof(names[0]); at++)
        if (!(*names[at].name = PyUnicode_InternFromString(names[at].spelled)))
            return -1;
    for (uint32_t at = 0; at < 256; at++) {
        uint32_t value = at;
        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? 0xEDB88320u ^ value >> 1 : value >> 1;
        crc_table[at] = value;
    }
    return PyModule_AddFunctions(module, methods);
}
