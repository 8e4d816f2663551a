/* The columns of a paged token history, and appending to them; see token_pages.c. */
#ifndef SLIPSTREAM_TOKEN_PAGES_H
#define SLIPSTREAM_TOKEN_PAGES_H

#include <Python.h>
#include <stdint.h>

#define PAGE_SHIFT 6 /* as in pages.py */
#define PAGE_LEN (1 << PAGE_SHIFT)

enum { LENGTHS, OFFSETS, TABLES, FREE, POOL, NUM_COLUMNS };

typedef struct {
    PyObject_HEAD
    int num_views;
    Py_buffer views[NUM_COLUMNS];
    int64_t *lengths, *offsets, *tables, *free_pages;
    uint32_t *pool;
    Py_ssize_t num_rows, width, num_stack, num_pages;
    char is_current; /* whether these are the columns of the history */
} TokenPages;

/* Appends a value to each row; returns how many pages are then left of the `num_free` free ones.
 *
 * -1 and no effect where pages, tables or pool have to grow first, or a row comes twice or is none;
 * *stopped is the index of the row that it failed at.
 */
static inline Py_ssize_t append_values(const TokenPages *self, const int64_t *rows,
                                       const uint32_t *values, Py_ssize_t num,
                                       Py_ssize_t num_free, Py_ssize_t *stopped)
{
    Py_ssize_t taken = 0, seen = 0;
    for (; seen < num; seen++) {
        int64_t row = rows[seen];
        if (row < 0 || row >= self->num_rows)
            break;
        int64_t length = self->lengths[row], first = self->offsets[row];
        if (length < 0 || length >> PAGE_SHIFT >= self->width)
            break;
        if (length & (PAGE_LEN - 1)) {
            if (first < -length || first >= self->num_pages * PAGE_LEN - length)
                break;
        } else {
            int64_t page = taken < num_free ? self->free_pages[num_free - ++taken] : -1;
            if (page < 0 || page >= self->num_pages)
                break;
        }
        self->lengths[row] = ~length; /* negative: a row that comes twice is found */
    }
    if (seen < num) {
        for (Py_ssize_t at = 0; at < seen; at++)
            self->lengths[rows[at]] = ~self->lengths[rows[at]];
        *stopped = seen;
        return -1;
    }
    Py_ssize_t left = num_free;
    for (Py_ssize_t at = 0; at < num; at++) {
        int64_t row = rows[at], length = ~self->lengths[row];
        if (!(length & (PAGE_LEN - 1))) {
            int64_t page = self->free_pages[--left], number = length >> PAGE_SHIFT;
            self->tables[row * self->width + number] = page;
            self->offsets[row] = (page - number) * PAGE_LEN;
        }
        self->pool[length + self->offsets[row]] = values[at];
        self->lengths[row] = length + 1;
    }
    return left;
}

#endif
