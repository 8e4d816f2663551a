/* Reads and writes the parts of msgpack that the columns of our messages are made of.
 *
 * A Reader that meets anything else fails, and stays so. A writer needs room for what it writes:
 * HEADER_BYTES for each value besides the bytes of a column or a text.
 */
#ifndef SLIPSTREAM_MSGPACK_H
#define SLIPSTREAM_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HEADER_BYTES 9

typedef struct {
    const uint8_t *at, *end;
    bool has_failed;
} Reader;

static inline uint64_t read_bytes(Reader *reader, size_t num)
{
    uint64_t value = 0;
    if (reader->has_failed || (size_t)(reader->end - reader->at) < num) {
        reader->has_failed = true;
        return 0;
    }
    for (size_t i = 0; i < num; i++)
        value = value << 8 | *reader->at++;
    return value;
}

static inline void expect(Reader *reader, uint8_t byte)
{
    if (read_bytes(reader, 1) != byte)
        reader->has_failed = true;
}

/* A number that is not negative. */
static inline uint64_t read_number(Reader *reader)
{
    uint64_t first = read_bytes(reader, 1);
    if (first < 0x80)
        return first;
    if (first >= 0xcc && first <= 0xcf)
        return read_bytes(reader, (size_t)1 << (first - 0xcc));
    reader->has_failed = true;
    return 0;
}

static inline const uint8_t *read_column(Reader *reader, size_t *num_bytes)
{
    uint64_t first = read_bytes(reader, 1);
    *num_bytes = 0;
    if (first < 0xc4 || first > 0xc6) {
        reader->has_failed = true;
        return reader->at;
    }
    uint64_t num = read_bytes(reader, (size_t)1 << (first - 0xc4));
    if (reader->has_failed || (uint64_t)(reader->end - reader->at) < num) {
        reader->has_failed = true;
        return reader->at;
    }
    const uint8_t *column = reader->at;
    reader->at += num;
    *num_bytes = (size_t)num;
    return column;
}

/* The number of values of an array; these follow. */
static inline uint64_t read_array(Reader *reader)
{
    uint64_t first = read_bytes(reader, 1);
    if ((first & 0xf0) == 0x90)
        return first & 0x0f;
    if (first == 0xdc || first == 0xdd)
        return read_bytes(reader, first == 0xdc ? 2 : 4);
    reader->has_failed = true;
    return 0;
}

/* The bytes of a text, which may be no UTF-8. */
static inline const uint8_t *read_text(Reader *reader, size_t *num_bytes)
{
    uint64_t first = read_bytes(reader, 1), num = first & 0x1f;
    *num_bytes = 0;
    if (first >= 0xd9 && first <= 0xdb)
        num = read_bytes(reader, (size_t)1 << (first - 0xd9));
    else if ((first & 0xe0) != 0xa0)
        reader->has_failed = true;
    if (reader->has_failed || (uint64_t)(reader->end - reader->at) < num) {
        reader->has_failed = true;
        return reader->at;
    }
    const uint8_t *text = reader->at;
    reader->at += num;
    *num_bytes = (size_t)num;
    return text;
}

static inline bool read_bool(Reader *reader)
{
    uint64_t byte = read_bytes(reader, 1);
    if (byte != 0xc2 && byte != 0xc3)
        reader->has_failed = true;
    return byte == 0xc3;
}

static inline uint8_t *write_bytes(uint8_t *at, uint8_t first, uint64_t value, int num)
{
    *at++ = first;
    while (num--)
        *at++ = (uint8_t)(value >> 8 * num);
    return at;
}

static inline uint8_t *write_number(uint8_t *at, uint64_t value)
{
    if (value < 0x80)
        return write_bytes(at, (uint8_t)value, 0, 0);
    if (value <= UINT8_MAX)
        return write_bytes(at, 0xcc, value, 1);
    if (value <= UINT16_MAX)
        return write_bytes(at, 0xcd, value, 2);
    if (value <= UINT32_MAX)
        return write_bytes(at, 0xce, value, 4);
    return write_bytes(at, 0xcf, value, 8);
}

static inline uint8_t *write_array(uint8_t *at, uint32_t num)
{
    if (num < 16)
        return write_bytes(at, (uint8_t)(0x90 | num), 0, 0);
    return num <= UINT16_MAX ? write_bytes(at, 0xdc, num, 2) : write_bytes(at, 0xdd, num, 4);
}

/* The header of a column; its bytes follow. */
static inline uint8_t *write_column(uint8_t *at, uint32_t num_bytes)
{
    if (num_bytes <= UINT8_MAX)
        return write_bytes(at, 0xc4, num_bytes, 1);
    return num_bytes <= UINT16_MAX ? write_bytes(at, 0xc5, num_bytes, 2)
                                   : write_bytes(at, 0xc6, num_bytes, 4);
}

/* The header of a text; its bytes follow. */
static inline uint8_t *write_text_header(uint8_t *at, uint32_t num_bytes)
{
    if (num_bytes < 32)
        return write_bytes(at, (uint8_t)(0xa0 | num_bytes), 0, 0);
    if (num_bytes <= UINT8_MAX)
        return write_bytes(at, 0xd9, num_bytes, 1);
    return num_bytes <= UINT16_MAX ? write_bytes(at, 0xda, num_bytes, 2)
                                   : write_bytes(at, 0xdb, num_bytes, 4);
}

static inline uint8_t *write_nil(uint8_t *at) { return write_bytes(at, 0xc0, 0, 0); }

/* The beginning of a frame; its body follows. */
static inline uint8_t *write_frame(uint8_t *at, uint64_t epoch, uint64_t seq, uint64_t ack)
{
    at = write_array(at, 4);
    at = write_number(at, epoch);
    at = write_number(at, seq);
    return write_number(at, ack);
}

#endif
