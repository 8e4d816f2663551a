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

/* Appends `counts[i]` values (NULL: one) to each row; returns how many pages are then left of the
 * `num_free` free ones.
 *
 * -1 and no effect where pages, tables or pool have to grow first, or a row comes twice or is none;
 * *stopped is the index of the row that it failed at. The values are as many as the counts say.
 */
static inline Py_ssize_t append_spans(const TokenPages *self, const int64_t *rows,
                                      const int64_t *counts, const uint32_t *values, Py_ssize_t num,
                                      Py_ssize_t num_free, Py_ssize_t *stopped)
{
    Py_ssize_t taken = 0, seen = 0;
    for (; seen < num; seen++) {
        const int64_t row = rows[seen], count = counts == NULL ? 1 : counts[seen];
        if (row < 0 || row >= self->num_rows)
            break;
        const int64_t length = self->lengths[row], first = self->offsets[row];
        if (length < 0 || count < 0 || count > self->width * PAGE_LEN - length)
            break;
        if (length & (PAGE_LEN - 1) &&
            (first < -length || first >= self->num_pages * PAGE_LEN - length))
            break;
        const int64_t begun = (length + PAGE_LEN - 1) >> PAGE_SHIFT;
        int64_t fresh = ((length + count + PAGE_LEN - 1) >> PAGE_SHIFT) - begun;
        for (; fresh > 0 && taken < num_free; fresh--) {
            const int64_t page = self->free_pages[num_free - ++taken];
            if (page < 0 || page >= self->num_pages)
                break;
        }
        if (fresh > 0)
            break;
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
        const int64_t row = rows[at], begin = ~self->lengths[row];
        const int64_t end = begin + (counts == NULL ? 1 : counts[at]);
        for (int64_t length = begin; length < end; length++) {
            if (!(length & (PAGE_LEN - 1))) {
                const int64_t page = self->free_pages[--left], number = length >> PAGE_SHIFT;
                self->tables[row * self->width + number] = page;
                self->offsets[row] = (page - number) * PAGE_LEN;
            }
            self->pool[length + self->offsets[row]] = *values++;
        }
        self->lengths[row] = end;
    }
    return left;
}

#endif
