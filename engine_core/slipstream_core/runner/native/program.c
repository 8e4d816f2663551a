/* A list of operations over rows, run by one team from the first to the last.
 *
 * A decode step of a small model is some dozens of operations that take microseconds each; called
 * one by one, the calls, and waking and gathering the team for each, cost more than they do.
 *
 * Every value is a part of a buffer [rows, width]: a pointer to its first row's first number, and
 * the buffer's width as the distance between rows. Operations that do not hang on one another are
 * not separated by a barrier (`together`: the next one may begin before this one is done).
 */

#include "kernels.h"

enum { NORM, PRODUCT, ROTATE, ATTEND, ADD, SILU_MUL };

typedef struct {
    int64_t buffer, at; /* buffer -1 is none */
} Part;

typedef struct {
    int64_t kind, together;
    Part a, b, c, out;   /* product: x, -, more; rotate: x, cosines, sines; attend: q, k, v */
    const float *weight; /* norm; product: packed */
    const float *bias;
    int64_t n, k;        /* product; others: n numbers to a row, or to each of its heads */
    int64_t heads, kv_heads, key_dim, value_dim, layer, window; /* heads: norm, rotate, attend */
    float number, softcap; /* norm: epsilon; attend: scale */
} Operation;

typedef struct {
    const Operation *operations;
    int64_t count, rows;
    float *const *buffers;
    const int64_t *widths;
    float *const *caches; /* by layer: keys, values */
    const Decode *decode; /* slots, tables, lengths: what is the same for all layers */
} Run;

static void run(const Run *r) {
    int64_t rows = r->rows;
    for (const Operation *o = r->operations; o < r->operations + r->count; o++) {
#define AT(part) (r->buffers[o->part.buffer] + o->part.at)
#define ROW(part) (o->part.buffer < 0 ? 0 : r->widths[o->part.buffer])
        float *out = AT(out);
        int64_t out_row = ROW(out);
        switch (o->kind) {
        case NORM:
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < rows; t++)
                for (int64_t h = 0; h < o->heads; h++)
                    slipstream_norm_row(AT(a) + t * ROW(a) + h * o->n, o->weight,
                                        out + t * out_row + h * o->n, o->n, o->number);
            break;
        case ROTATE:
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < rows; t++)
                slipstream_rotate_token(AT(a) + t * ROW(a), o->n, AT(b) + t * ROW(b),
                                        AT(c) + t * ROW(c), out + t * out_row, o->heads, o->n);
            break;
        case ADD:
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < rows; t++) {
                const float *a = AT(a) + t * ROW(a), *b = AT(b) + t * ROW(b);
                for (int64_t i = 0; i < o->n; i++) out[t * out_row + i] = a[i] + b[i];
            }
            break;
        case SILU_MUL:
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < rows; t++)
                slipstream_silu_mul_row(AT(a) + t * ROW(a), AT(b) + t * ROW(b),
                                        out + t * out_row, o->n);
            break;
        case PRODUCT: {
            Product p = {AT(a), ROW(a), o->weight, o->bias, o->c.buffer < 0 ? 0 : AT(c), ROW(c),
                         out, out_row, rows, o->n, o->k};
            slipstream_product_together(&p);
            continue; /* it ends with a barrier */
        }
        case ATTEND: {
            Decode d = *r->decode;
            d.query = AT(a), d.query_row = ROW(a), d.query_head = o->key_dim;
            d.key = AT(b), d.key_token = ROW(b), d.key_head = o->key_dim;
            d.value = AT(c), d.value_token = ROW(c), d.value_head = o->value_dim;
            d.keys = r->caches[2 * o->layer], d.values = r->caches[2 * o->layer + 1];
            d.output = out, d.sinks = 0;
            d.heads = o->heads, d.kv_heads = o->kv_heads;
            d.key_dim = o->key_dim, d.value_dim = o->value_dim;
            d.window = o->window, d.scale = o->number, d.softcap = o->softcap;
            slipstream_attend_together(&d);
            continue;
        }
        }
        if (!o->together) {
#pragma omp barrier
        }
    }
}

void slipstream_run(const Run *r) {
#pragma omp parallel
    run(r);
}
