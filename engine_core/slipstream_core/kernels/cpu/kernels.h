/* Arguments of the kernels, and functions shared between their source files. */

#ifndef SLIPSTREAM_KERNELS_H
#define SLIPSTREAM_KERNELS_H

#include <stdint.h>

#include "activations.h"
#include "team.h"

/* Attention over the paged cache. A row is a token of the step. */
typedef struct {
    const float *key, *value; /* [tokens, kv_heads, dim]: of the step's tokens, stored first */
    int64_t key_token, key_head, value_token, value_head; /* strides in floats */
    const int64_t *slots;                                 /* [tokens] */
    int64_t tokens;
    const float *query; /* [rows, heads, key_dim], strides in floats, the last is 1 */
    int64_t query_row, query_head;
    void *keys, *values;        /* [slots, kv_heads, dim], as `cache` has it; equal: a value begins
                                 * its key, which alone is stored */
    const int32_t *tables;      /* of all batch slots, widest numbers apart */
    int64_t widest;
    const int64_t *table_rows; /* [rows]: whose tables they are */
    const int32_t *lens; /* [rows]: tokens up to and with it, at least 1 */
    const int64_t *tiles; /* [num_tiles + 1]: where runs of one request's next tokens begin, which
                           * are computed together; NULL: each row by itself */
    int64_t num_tiles;
    float *output;       /* [rows, heads, value_dim] */
    const float *sinks;  /* [heads] or NULL */
    int64_t rows, heads, kv_heads, key_dim, value_dim, block_size;
    int64_t window; /* tokens attended to; 0: all */
    int64_t chunk;  /* those before a multiple of this are not; 0: they are */
    float scale, softcap; /* softcap 0: none */
    int64_t cache; /* 0: float32, 1: float8 e4m3, 2: int8, behind a head's of which is its scale */
} Decode;

/* y = (x W^T + bias) + more. */
typedef struct {
    const float *x; /* [rows, k], rows x_row floats apart */
    int64_t x_row;
    const void *packed;
    const float *bias; /* [n] or NULL */
    const float *more; /* [rows, n], rows more_row floats apart, or NULL */
    int64_t more_row;
    float *y; /* [rows, n], rows y_row floats apart; may be `more` */
    int64_t y_row, rows, n, k;
    int64_t format; /* of `packed`: 0, float32, or as coded.h has it */
} Product;

/* Products of one size, without biases. */
typedef struct {
    Product first;
    int64_t count, x_apart, y_apart; /* floats from one's to the next's */
    int64_t packed_bytes;
} Products;

/* The rows of a step whose states mixers continue. A row's tokens are one segment or several, behind
 * each of which its state may be saved. */
typedef struct {
    int64_t rows;
    const int64_t *segments; /* [rows + 1]: where each row's begin */
    const int64_t *tokens;   /* [segments + 1]: where each segment's begin */
    const int64_t *saved;    /* [segments]: the slot that keeps the state behind it, or -1 */
    const int64_t *slots;    /* [rows]: that keep their states behind their tokens */
    const int64_t *reads;    /* [rows]: that have them before; mostly the same */
    const uint8_t *begins;   /* [rows]: without a state, whatever the slot holds */
    const int64_t *prompts;  /* [rows]: of a row's tokens, the first that are of its prompt */
} Mixing;

/* A causal convolution of each channel over its last `taps` inputs. */
typedef struct {
    const Mixing *m;
    const float *x; /* [tokens, channels], tokens x_token floats apart */
    int64_t x_token;
    const float *weight; /* [taps, channels] */
    const float *bias;   /* [channels] or NULL */
    float *output;       /* [tokens, channels] */
    float *states;       /* [slots, state_size] */
    int64_t state_size, channels, taps;
    int64_t activates; /* silu */
} Convolve;

/* state = exp(decay) state + key (x) strength (value - is_delta exp(decay) state key);
 * output = state query + skip value; of each head, tokens x_token floats apart. */
typedef struct {
    const Mixing *m;
    const float *query, *key; /* [tokens, key_heads, key_dim] */
    const float *value;       /* [tokens, heads, value_dim] */
    const float *decay;       /* [tokens, heads], or [tokens, heads, key_dim]: logarithms; or NULL */
    const float *strength;    /* [tokens, heads] or NULL */
    const float *skip;        /* [heads] or NULL */
    const float *rates;       /* without a decay, it in times of the strength: [heads, key_dim]; else
                               * NULL, or [heads] where a prompt's tokens have strengths between
                               * `least` and `most` */
    float *output;            /* [tokens, heads, value_dim] */
    float *states;            /* [slots, state_size] */
    int64_t query_token, key_token, value_token, decay_token, strength_token;
    int64_t state_size, key_heads, heads, key_dim, value_dim;
    int64_t is_delta, decays_by_key;
    float scale;   /* of queries */
    float epsilon; /* queries and keys become unit vectors; below 0: they stay */
    float least, most;
} Recur;

/* A low-rank change of a product, of one adapter at one site: y += B (A x). */
typedef struct {
    const void *a; /* [rank, k] */
    const void *b; /* [rank, n], with the adapter's scale */
    int64_t rank;  /* 0: it does not change this site */
    int64_t a_kind, b_kind; /* FLOAT32, CODE_BF16 or CODE_F16 of coded.h */
} Adapted;

/* The changes of a site's products. */
typedef struct {
    const float *x; /* [rows, k], rows x_row floats apart */
    int64_t x_row;
    float *y; /* [rows, n], rows y_row floats apart */
    int64_t y_row, rows, k, n;
    const int32_t *adapters; /* [rows], -1: none */
    const Adapted *adapted;  /* of the site, by adapter, `apart` apart */
    int64_t apart;
} Adapt;

/* The experts that rows go to. */
typedef struct {
    const float *logits; /* [rows, experts], rows logits_row floats apart */
    int64_t logits_row;
    const float *bias;            /* [experts], added to scores to choose by, or NULL */
    float *chosen_weights, *ids;  /* [rows, chosen]; ids are whole numbers */
    int64_t rows, experts, chosen, scores, weighs;
    int64_t groups, chosen_groups, best_of_group; /* experts are chosen from the best groups */
    float scale, epsilon;                         /* of weights; of the sum they are divided by */
} Route;

/* y = sum over a row's choices of weight * down(activation(up(x))). */
typedef struct {
    const float *x; /* [rows, k], rows x_row floats apart */
    int64_t x_row;
    const float *weights, *ids; /* [rows, chosen]; ids are whole numbers below `experts` */
    int64_t weights_row, ids_row;
    const void *up, *down;     /* packed matrices [2 * inner, k], gates first, and [n, inner] */
    int64_t up_bytes, down_bytes;          /* from one expert's to the next's */
    const float *up_bias, *down_bias;      /* [experts, 2 * inner], [experts, n]; or NULL */
    float *y;                              /* [rows, n], rows y_row floats apart */
    int64_t y_row;
    float *scratch; /* slipstream_experts_scratch(p) floats a row */
    int64_t rows, experts, chosen, k, inner, n;
    int64_t up_format, down_format;
    int64_t is_gated, activation; /* not gated: [inner, k], and its square above zero */
    float alpha, limit;           /* of the clamped one */
} Experts;

/* Stages of a job (team.h): attention has two, storing and attending, and a product has one. */
Stage slipstream_attend_stage(const Decode *p, int64_t part, int64_t after);
void slipstream_attend_work(const Decode *p, int64_t part, int64_t first, int64_t last);
Stage slipstream_product_stage(const Product *p, int64_t after);
void slipstream_product_work(const Product *p, int64_t first, int64_t last);

Stage slipstream_convolve_stage(const Convolve *p, int64_t after);
void slipstream_convolve_work(const Convolve *p, int64_t first, int64_t last);
Stage slipstream_recur_stage(const Recur *p, int64_t after);
void slipstream_recur_work(const Recur *p, int64_t first, int64_t last);

#define EXPERT_STAGES 6
Stage slipstream_experts_stage(const Experts *p, int64_t part, int64_t after);
void slipstream_experts_work(const Experts *p, int64_t part, int64_t first, int64_t last);
int64_t slipstream_experts_scratch(const Experts *p);
void slipstream_route_row(const Route *r, const float *logits, float *weights, float *ids);

void slipstream_norm_row(const float *in, const float *weight, float *out, int64_t dim,
                         float epsilon);
void slipstream_sigmoid_row(const float *x, float *y, int64_t dim);
void slipstream_softplus_row(const float *x, float *y, int64_t dim);
void slipstream_silu_mul_row(const float *g, const float *u, float *out, int64_t dim);
void slipstream_rotate_token(const float *x, int64_t x_head, const float *c, const float *s,
                             float *y, int64_t heads, int64_t dim, int64_t width);

void slipstream_adapt_rows(const Adapt *p, int64_t first, int64_t last);
int64_t slipstream_adapt_chunk(int64_t rows);

#define ROW_CHUNK 16384 /* numbers that an operation by row processes in some microseconds */

/* The number of rows of `numbers` numbers to claim at once. */
static inline int64_t slipstream_row_chunk(int64_t numbers) {
    return numbers < ROW_CHUNK ? ROW_CHUNK / (numbers + 1) + 1 : 1;
}

#endif
