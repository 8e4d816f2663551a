/* What the relays of whole messages share: columns of `Step` and `Deltas`, and frames that they write.
 *
 * A message has `num` entries, and `counts` tokens of each; without counts, one.
 */
#ifndef SLIPSTREAM_RELAY_H
#define SLIPSTREAM_RELAY_H

#include <Python.h>

#include "link_numbers.h"
#include "msgpack.h"

#define DELTAS_TAG 22 /* as in tags.py */
#define REPORT_TAG 31
#define STEP_TAG 43
#define DELTAS_FIELDS 13 /* with the tag */
#define REPORT_FIELDS 4
#define STEP_FIELDS 8
#define LOGPROB_FIELDS 5

/* A column as it came, of u32: not aligned. */
typedef struct {
    const uint8_t *at;
    size_t num_bytes;
} Column;

static inline Column take_column(Reader *reader)
{
    Column column;
    column.at = read_column(reader, &column.num_bytes);
    return column;
}

static inline void expect_no_column(Reader *reader)
{
    if (take_column(reader).num_bytes)
        reader->has_failed = true;
}

static inline uint32_t value_at(Column column, Py_ssize_t at)
{
    uint32_t value;
    memcpy(&value, column.at + 4 * at, 4);
    return value;
}

/* The number of an entry's tokens. */
static inline uint32_t count_at(Column counts, Py_ssize_t at)
{
    return counts.num_bytes ? value_at(counts, at) : 1;
}

/* The number of tokens of all entries; fails where there are not `num` counts. */
static inline size_t total_of(Reader *reader, Column counts, Py_ssize_t num)
{
    if (!counts.num_bytes)
        return (size_t)num;
    if (counts.num_bytes != 4 * (size_t)num) {
        reader->has_failed = true;
        return 0;
    }
    size_t total = 0;
    for (Py_ssize_t at = 0; at < num; at++)
        total += value_at(counts, at);
    return total;
}

/* Log-probabilities with `width` candidates of each token; of width 0 there are none. */
typedef struct {
    uint64_t width;
    Column whole, columns[3]; /* as they are encoded; values, ids and ranks */
} Logprobs;

/* Fails where the tokens have different numbers of candidates. */
static inline Logprobs take_logprobs(Reader *reader, size_t num_tokens)
{
    Logprobs logprobs = {0};
    logprobs.whole.at = reader->at;
    if (reader->at < reader->end && *reader->at == 0xc0)
        reader->at++;
    else {
        expect(reader, 0x90 | LOGPROB_FIELDS);
        logprobs.width = read_number(reader);
        if (logprobs.width < 1 || logprobs.width > UINT32_MAX)
            reader->has_failed = true;
        for (int at = 0; at < 3; at++) {
            const Column column = logprobs.columns[at] = take_column(reader);
            if (column.num_bytes % 4 ||
                column.num_bytes / 4 != num_tokens * (at < 2 ? logprobs.width : 1))
                reader->has_failed = true;
        }
        expect_no_column(reader);
    }
    logprobs.whole.num_bytes = (size_t)(reader->at - logprobs.whole.at);
    return logprobs;
}

static inline PyObject *bytes_of(Column column)
{
    return PyBytes_FromStringAndSize((const char *)column.at, (Py_ssize_t)column.num_bytes);
}

/* The LogprobColumns, which `type` makes, or None; NULL: error. */
static inline PyObject *logprob_columns(const Logprobs *logprobs, PyObject *type)
{
    if (!logprobs->width)
        return Py_NewRef(Py_None);
    PyObject *args[LOGPROB_FIELDS - 1] = {PyLong_FromUnsignedLongLong(logprobs->width)};
    PyObject *columns = NULL;
    bool is_whole = args[0] != NULL;
    for (int at = 0; at < 3; at++)
        is_whole &= (args[1 + at] = bytes_of(logprobs->columns[at])) != NULL;
    if (is_whole)
        columns = PyObject_Vectorcall(type, args, LOGPROB_FIELDS - 1, NULL);
    for (int at = 0; at < LOGPROB_FIELDS - 1; at++)
        Py_XDECREF(args[at]);
    return columns;
}

/* A column with its header. */
static inline uint8_t *write_whole(uint8_t *at, const void *column, size_t num_bytes)
{
    at = write_column(at, (uint32_t)num_bytes);
    if (num_bytes)
        memcpy(at, column, num_bytes);
    return at + num_bytes;
}

/* True if `write` takes the message; -1: error. */
static inline int hand_over(PyObject *write, const uint8_t *data, const uint8_t *end)
{
    PyObject *message = PyBytes_FromStringAndSize((const char *)data, end - data);
    if (message == NULL)
        return -1;
    PyObject *taken = PyObject_CallOneArg(write, message);
    Py_DECREF(message);
    const int is_taken = taken == NULL ? -1 : PyObject_IsTrue(taken);
    Py_XDECREF(taken);
    return is_taken;
}

/* Acknowledge all that was received: 1 if `write` takes that; -1: error. */
static inline int send_ack(Numbers *link, uint64_t epoch, PyObject *write)
{
    uint8_t data[5 * HEADER_BYTES];
    uint8_t *end = write_frame(data, epoch, (uint64_t)link->sent, (uint64_t)link->received);
    const int is_taken = hand_over(write, data, write_nil(end));
    if (is_taken > 0)
        link->last_ack_sent = link->received;
    return is_taken;
}

#endif
