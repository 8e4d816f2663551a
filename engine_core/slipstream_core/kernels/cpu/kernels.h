/* Arguments of the kernels, and functions shared between their source files. */

#ifndef SLIPSTREAM_KERNELS_H
#define SLIPSTREAM_KERNELS_H

#include <stdint.h>

#include "team.h"

/* Attention of decode rows over the paged cache. */
typedef struct {
    const float *key, *value; /* [tokens, kv_heads, dim]: of the step's tokens, stored first */
    int64_t key_token, key_head, value_token, value_head; /* strides in floats */
    const int64_t *slots;                                 /* [tokens] */
    int64_t tokens;
    const float *query; /* [rows, heads, key_dim], strides in floats, the last is 1 */
    int64_t query_row, query_head;
    float *keys, *values;       /* [slots, kv_heads, dim]; equal: a value begins its key, which
                                 * alone is stored */
    const int32_t *tables;      /* of all batch slots, widest numbers apart */
    int64_t widest;
    const int64_t *table_rows; /* [rows]: whose tables they are */
    const int32_t *lens; /* [rows], at least 1 */
    float *output;       /* [rows, heads, value_dim] */
    const float *sinks;  /* [heads] or NULL */
    int64_t rows, heads, kv_heads, key_dim, value_dim, block_size;
    int64_t window; /* tokens attended to; 0: all */
    float scale, softcap; /* softcap 0: none */
} Decode;

/* y = (x W^T + bias) + more. */
typedef struct {
    const float *x; /* [rows, k], rows x_row floats apart */
    int64_t x_row;
    const float *packed;
    const float *bias; /* [n] or NULL */
    const float *more; /* [rows, n], rows more_row floats apart, or NULL */
    int64_t more_row;
    float *y; /* [rows, n], rows y_row floats apart; may be `more` */
    int64_t y_row, rows, n, k;
} Product;

/* Stages of a job (team.h): attention has two, storing and attending, and a product has one. */
Stage slipstream_attend_stage(const Decode *p, int64_t part, int64_t after);
void slipstream_attend_work(const Decode *p, int64_t part, int64_t first, int64_t last);
Stage slipstream_product_stage(const Product *p, int64_t after);
void slipstream_product_work(const Product *p, int64_t first, int64_t last);

void slipstream_norm_row(const float *in, const float *weight, float *out, int64_t dim,
                         float epsilon);
void slipstream_silu_mul_row(const float *g, const float *u, float *out, int64_t dim);
void slipstream_rotate_token(const float *x, int64_t x_head, const float *c, const float *s,
                             float *y, int64_t heads, int64_t dim);

#define ROW_CHUNK 16384 /* numbers that an operation by row processes in some microseconds */

/* The number of rows of `numbers` numbers to claim at once. */
static inline int64_t slipstream_row_chunk(int64_t numbers) {
    return numbers < ROW_CHUNK ? ROW_CHUNK / (numbers + 1) + 1 : 1;
}

#endif
