/* Reads a message that has nothing but tokens, their text and candidates for some streams, behind
 * what these have; `plain_ends` in plain_deltas.py is the reference.
 */
#ifndef SLIPSTREAM_PLAIN_DELTAS_H
#define SLIPSTREAM_PLAIN_DELTAS_H

#include <Python.h>

#include "relay.h"

typedef struct {
    Py_ssize_t num; /* entries */
    uint64_t seq, ack;
    Column columns[3]; /* handles, and where the entries begin: chars and tokens */
    Column ids, counts;
    Logprobs logprobs;
    PyObject *texts;
} Plain;

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

/* True if what follows the texts is plain, up to the end of the message. */
static inline bool read_rest(Reader *reader, Plain *plain)
{
    plain->ids = take_column(reader);
    plain->counts = take_column(reader);
    const size_t num_tokens = total_of(reader, plain->counts, plain->num);
    if (plain->ids.num_bytes % 4 || plain->ids.num_bytes / 4 != num_tokens)
        reader->has_failed = true;
    expect_no_column(reader); /* ended */
    expect(reader, 0x90);     /* ends */
    plain->logprobs = take_logprobs(reader, num_tokens);
    expect_no_column(reader); /* kinds */
    expect_no_column(reader); /* entries with events */
    expect(reader, 0x90);     /* and these */
    return !reader->has_failed && reader->at == reader->end;
}

/* True if the message is the link's next one and plain, and what it acknowledges leaves nothing to be
 * done; then `texts` is set. No error is set.
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
        plain->columns[at] = take_column(&reader);
    const size_t size = plain->columns[0].num_bytes;
    plain->num = (Py_ssize_t)(size / 4);
    const long long ack = (long long)plain->ack;
    if (reader.has_failed || !size || size % 4 || plain->columns[1].num_bytes != size ||
        plain->columns[2].num_bytes != size ||
        !are_idle(link, ack > link->acked ? ack : link->acked))
        return false;
    plain->texts = read_texts(&reader, plain->num);
    if (plain->texts != NULL && !read_rest(&reader, plain))
        Py_CLEAR(plain->texts);
    if (plain->texts == NULL)
        PyErr_Clear(); /* the other way tells */
    return plain->texts != NULL;
}

/* True if the column is the same as `given`. */
static inline bool is_column(Column column, PyObject *given)
{
    return given != NULL && PyBytes_CheckExact(given) &&
           column.num_bytes == (size_t)PyBytes_GET_SIZE(given) &&
           !memcmp(column.at, PyBytes_AS_STRING(given), column.num_bytes);
}

/* Where the entries end in characters: bytes of u32; NULL: error. */
static inline PyObject *ends_in_chars(const Plain *plain)
{
    PyObject *ends = PyBytes_FromStringAndSize(NULL, 4 * plain->num);
    for (Py_ssize_t at = 0; at < plain->num && ends != NULL; at++) {
        const uint32_t end = value_at(plain->columns[1], at) +
                             (uint32_t)PyUnicode_GET_LENGTH(PyList_GET_ITEM(plain->texts, at));
        memcpy(PyBytes_AS_STRING(ends) + 4 * at, &end, 4);
    }
    return ends;
}

/* Where they end in tokens, likewise. */
static inline PyObject *ends_in_tokens(const Plain *plain)
{
    PyObject *ends = PyBytes_FromStringAndSize(NULL, 4 * plain->num);
    for (Py_ssize_t at = 0; at < plain->num && ends != NULL; at++) {
        const uint32_t end = value_at(plain->columns[2], at) + count_at(plain->counts, at);
        memcpy(PyBytes_AS_STRING(ends) + 4 * at, &end, 4);
    }
    return ends;
}

#endif
