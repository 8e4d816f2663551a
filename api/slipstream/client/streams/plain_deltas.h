/* Reads a message that has nothing but a token, its text and candidates for each of the streams of
 * the message before it, behind that; `plain_ends` in plain_deltas.py is the reference.
 */
#ifndef SLIPSTREAM_PLAIN_DELTAS_H
#define SLIPSTREAM_PLAIN_DELTAS_H

#include <Python.h>

#include "link_numbers.h"
#include "msgpack.h"

#define DELTAS_TAG 22 /* as in tags.py */
#define DELTAS_FIELDS 13 /* with the tag */
#define LOGPROB_FIELDS 5

typedef struct {
    const uint8_t *at;
    size_t num_bytes;
} Span;

typedef struct {
    Py_ssize_t num; /* entries */
    PyObject *columns[3]; /* of the streams: handles, chars and tokens */
    uint64_t seq, ack, width;
    Span ids, logprobs[3]; /* values, ids and ranks */
    PyObject *texts;
} Plain;

/* A column that is the same as `given`. */
static inline void expect_column(Reader *reader, PyObject *given)
{
    size_t num_bytes;
    const uint8_t *column = read_column(reader, &num_bytes);
    if (reader->has_failed || num_bytes != (size_t)PyBytes_GET_SIZE(given) ||
        memcmp(column, PyBytes_AS_STRING(given), num_bytes))
        reader->has_failed = true;
}

static inline void expect_no_column(Reader *reader)
{
    size_t num_bytes;
    read_column(reader, &num_bytes);
    if (num_bytes)
        reader->has_failed = true;
}

/* One text to each entry; NULL where there is another number, or one is no text. */
static inline PyObject *read_texts(Reader *reader, Py_ssize_t num)
{
    if (read_array(reader) != (uint64_t)num || reader->has_failed)
        return NULL;
    PyObject *texts = PyList_New(num);
    for (Py_ssize_t at = 0; at < num && texts != NULL; at++) {
        size_t num_bytes;
        const uint8_t *text = read_text(reader, &num_bytes);
        PyObject *one = reader->has_failed ? NULL
                                           : PyUnicode_DecodeUTF8((const char *)text,
                                                                  (Py_ssize_t)num_bytes, NULL);
        if (one == NULL)
            Py_CLEAR(texts);
        else
            PyList_SET_ITEM(texts, at, one);
    }
    return texts;
}

/* Columns with equally many candidates of each token, or none. */
static inline void read_logprobs(Reader *reader, Plain *plain)
{
    if (reader->at < reader->end && *reader->at == 0xc0) {
        reader->at++;
        return;
    }
    expect(reader, 0x90 | LOGPROB_FIELDS);
    plain->width = read_number(reader);
    if (plain->width < 1 || plain->width > UINT32_MAX)
        reader->has_failed = true;
    for (int at = 0; at < 3; at++) {
        Span *column = &plain->logprobs[at];
        column->at = read_column(reader, &column->num_bytes);
        if (column->num_bytes / 4 != (size_t)plain->num * (at < 2 ? plain->width : 1) ||
            column->num_bytes % 4)
            reader->has_failed = true;
    }
    expect_no_column(reader);
}

/* True if what follows the texts is plain, up to the end of the message. */
static inline bool read_rest(Reader *reader, Plain *plain)
{
    plain->ids.at = read_column(reader, &plain->ids.num_bytes);
    if (plain->ids.num_bytes != 4 * (size_t)plain->num)
        reader->has_failed = true;
    expect_no_column(reader); /* counts */
    expect_no_column(reader); /* ended */
    expect(reader, 0x90);     /* ends */
    read_logprobs(reader, plain);
    expect_no_column(reader); /* kinds */
    expect_no_column(reader); /* entries with events */
    expect(reader, 0x90);     /* and these */
    return !reader->has_failed && reader->at == reader->end;
}

/* True if the message is the link's next one and continues the streams, and what it acknowledges
 * leaves nothing to be done; then `texts` is set. No error is set.
 */
static inline bool read_plain(const Numbers *link, uint64_t own_epoch, const uint8_t *data,
                              size_t num_bytes, Plain *plain)
{
    Reader reader = {data, data + num_bytes, false};
    expect(&reader, 0x94);
    const uint64_t epoch = read_number(&reader);
    plain->seq = read_number(&reader);
    plain->ack = read_number(&reader);
    expect(&reader, 0x90 | DELTAS_FIELDS);
    expect(&reader, DELTAS_TAG);
    if (reader.has_failed || plain->seq != (uint64_t)link->received + 1 || epoch != own_epoch ||
        plain->ack > (uint64_t)link->sent)
        return false;
    for (int at = 0; at < 3; at++)
        expect_column(&reader, plain->columns[at]);
    const long long ack = (long long)plain->ack;
    if (reader.has_failed || !are_idle(link, ack > link->acked ? ack : link->acked))
        return false;
    plain->texts = read_texts(&reader, plain->num);
    if (plain->texts != NULL && !read_rest(&reader, plain))
        Py_CLEAR(plain->texts);
    if (plain->texts == NULL)
        PyErr_Clear(); /* the other way tells */
    return plain->texts != NULL;
}

static inline PyObject *bytes_of(Span span)
{
    return PyBytes_FromStringAndSize((const char *)span.at, (Py_ssize_t)span.num_bytes);
}

/* Its LogprobColumns, which `type` makes, or None; NULL: error. */
static inline PyObject *logprobs_of(const Plain *plain, PyTypeObject *type)
{
    if (!plain->width)
        return Py_NewRef(Py_None);
    PyObject *args[LOGPROB_FIELDS - 1] = {
        PyLong_FromUnsignedLongLong(plain->width), bytes_of(plain->logprobs[0]),
        bytes_of(plain->logprobs[1]), bytes_of(plain->logprobs[2])};
    PyObject *columns = NULL;
    if (args[0] != NULL && args[1] != NULL && args[2] != NULL && args[3] != NULL)
        columns = PyObject_Vectorcall((PyObject *)type, args, LOGPROB_FIELDS - 1, NULL);
    for (int at = 0; at < LOGPROB_FIELDS - 1; at++)
        Py_XDECREF(args[at]);
    return columns;
}

/* A u32 column, each value larger by 1, or by the length of its text. */
static inline PyObject *moved(PyObject *column, PyObject *texts)
{
    const Py_ssize_t num = PyBytes_GET_SIZE(column) / 4;
    PyObject *next = PyBytes_FromStringAndSize(NULL, 4 * num);
    for (Py_ssize_t at = 0; at < num && next != NULL; at++) {
        uint32_t value; /* columns need not be aligned */
        memcpy(&value, PyBytes_AS_STRING(column) + 4 * at, 4);
        value += texts == NULL ? 1 : (uint32_t)PyUnicode_GET_LENGTH(PyList_GET_ITEM(texts, at));
        memcpy(PyBytes_AS_STRING(next) + 4 * at, &value, 4);
    }
    return next;
}

#endif
