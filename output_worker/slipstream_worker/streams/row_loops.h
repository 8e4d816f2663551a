/* The buffers of StreamColumns, and which tokens are plain for a row; see row_loops.c. */
#ifndef SLIPSTREAM_ROW_LOOPS_H
#define SLIPSTREAM_ROW_LOOPS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    PyObject_HEAD
    PyObject *texts; /* list of str, by entry */
    Py_ssize_t num_views;
    Py_buffer views[20];
    Py_ssize_t num_rows, num_entries, num_ids, num_sets;
    int64_t vocab_size;
    /* by row */
    uint8_t *is_fast, *is_dirty;
    int64_t *intervals, *lengths, *sent_tokens, *sent_chars, *kinds, *max_tokens, *firsts, *sets;
    uint32_t *handles, *last_ids;
    double *delivered_at;
    uint64_t *stop_low, *stop_high;
    /* by entry: view of the vocabulary and token id */
    uint8_t *is_plain;
    uint64_t *low, *high;
    /* by set of stop strings and token id */
    uint8_t *harmless;
} RowLoops;

/* The entry of a token; -1 if there is none. */
static inline int64_t entry_of(const RowLoops *self, int64_t row, uint32_t token_id)
{
    int64_t id = token_id < self->vocab_size ? token_id : self->vocab_size;
    int64_t first = self->firsts[row];
    return first < 0 || first + id >= self->num_entries ? -1 : first + id;
}

static inline bool is_plain_for(const RowLoops *self, int64_t row, uint32_t token_id)
{
    int64_t at = entry_of(self, row, token_id);
    if (at < 0 || !self->is_plain[at])
        return false;
    const uint64_t low = self->stop_low[row], high = self->stop_high[row];
    if (!(low | high) || !((self->low[at] & low) | (self->high[at] & high)))
        return true;
    int64_t set = self->sets[row], id = at - self->firsts[row];
    if (set < 0 || set >= self->num_sets || id >= self->num_ids)
        return false;
    return self->harmless[set * self->num_ids + id];
}

/* The bucket of a duration in a histogram with these upper bounds. */
static inline Py_ssize_t bucket_of(const double *bounds, Py_ssize_t num_bounds, double seconds)
{
    Py_ssize_t bucket = 0;
    while (bucket < num_bounds && bounds[bucket] < seconds)
        bucket++;
    return bucket;
}

#endif
