/* Float32 kernels for CPUs: attention over the paged cache, and the small
 * operations of a decode step that cost more to dispatch than to compute.
 *
 * The source is compiled on the machine that runs it (c_library.py), so -march=native is safe. It
 * uses GCC's and Clang's vector extensions instead of intrinsics, and the threads of team.c.
 *
 * - Nothing here allocates, waits or keeps state; every buffer belongs to the caller.
 * - Only the tokens that a row attends to are read: no padding, no mask, never the null block.
 */

#include "kernels.h"

#include "coded.h"

#define CHUNK 32     /* tokens per pass: their keys stay in L1 or L2 */
#define TOGETHER 2   /* queries that the same registers of keys and values serve */
#define FEW_HEADS 8  /* query heads to an item, if all have the same keys */

static inline vec4 fold(vec x) {
    vec4 parts[W / 4];
    memcpy(parts, &x, sizeof x);
    vec4 sum = parts[0];
    for (int i = 1; i < W / 4; i++) sum += parts[i];
    return sum;
}

/* Sums of neighbouring lanes, those of a's and of b's by turns in each quarter of a register. */
static inline vec pairs(vec a, vec b) {
#if W == 16
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif W == 8
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* The sums of four vectors' lanes, side by side. */
static inline vec4 sums(vec a, vec b, vec c, vec d) { return fold(pairs(pairs(a, b), pairs(c, d))); }

#define ALWAYS static inline __attribute__((always_inline))

/* scores[m][t] = queries[m] . keys[t] * scale for M queries, a constant, and n tokens; each product
 * in the same order, whatever is beside it. Up to three numbers behind the last token are written. */
ALWAYS void score(const int M, const float *const *queries, const float *const *keys, int n, int dim,
                  float scale, float (*scores)[CHUNK]) {
    int whole = dim - dim % W;
    for (int t = 0; t < n; t += 4) {
        const float *k[4];
        for (int j = 0; j < 4; j++) k[j] = keys[t + j < n ? t + j : n - 1];
        vec c[TOGETHER][4] = {{{0}}}; /* of constant size, as in products.c */
        for (int i = 0; i < whole; i += W) {
            vec a = *(const vec *)(k[0] + i), b = *(const vec *)(k[1] + i);
            vec d = *(const vec *)(k[2] + i), e = *(const vec *)(k[3] + i);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                vec q = *(const vec *)(queries[m] + i);
                c[m][0] += q * a, c[m][1] += q * b, c[m][2] += q * d, c[m][3] += q * e;
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            vec4 dots = sums(c[m][0], c[m][1], c[m][2], c[m][3]);
            for (int i = whole; i < dim; i++) {
                vec4 rest = {k[0][i], k[1][i], k[2][i], k[3][i]};
                dots += rest * queries[m][i];
            }
            *(vec4 *)(scores[m] + t) = dots * scale;
        }
    }
}

/* sums[m][:] += probs[m][i] * values[i][:] over n tokens in order, for M queries, a constant. */
ALWAYS void gather(const int M, const float *const *probs, const float *const *values, int n, int dim,
                   float *const *sums_of) {
    int i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) {
        vec c[TOGETHER][4];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const vec *at = (const vec *)(sums_of[m] + i);
            c[m][0] = at[0], c[m][1] = at[1], c[m][2] = at[2], c[m][3] = at[3];
        }
        for (int t = 0; t < n; t++) {
            const vec *v = (const vec *)(values[t] + i);
            vec v0 = v[0], v1 = v[1], v2 = v[2], v3 = v[3];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                float prob = probs[m][t];
                c[m][0] += prob * v0, c[m][1] += prob * v1;
                c[m][2] += prob * v2, c[m][3] += prob * v3;
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            vec *at = (vec *)(sums_of[m] + i);
            at[0] = c[m][0], at[1] = c[m][1], at[2] = c[m][2], at[3] = c[m][3];
        }
    }
    for (int m = 0; m < M; m++) {
        float *sum = sums_of[m];
        int j = i;
        for (; j + W <= dim; j += W) {
            vec a = *(vec *)(sum + j);
            for (int t = 0; t < n; t++) a += probs[m][t] * *(const vec *)(values[t] + j);
            *(vec *)(sum + j) = a;
        }
        for (; j < dim; j++)
            for (int t = 0; t < n; t++) sum[j] += probs[m][t] * values[t][j];
    }
}

enum { AS_FLOAT32, AS_E4M3, AS_INT8 }; /* of a cache */

/* Bytes of a token's key or value of one head. */
static int64_t bytes_of(const Decode *p, int64_t dim) {
    return p->cache == AS_FLOAT32 ? 4 * dim : p->cache == AS_E4M3 ? dim : dim + 4;
}

static float largest_of(const float *x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(fabsf(x[i]) < INFINITY)) return NAN;
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    }
    return most;
}

/* To the nearest, of two the even one; what is too large becomes 448. */
static uint8_t e4m3_of(float x) {
    union { float value; uint32_t bits; } u = {fabsf(x)};
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) return sign | 0x7f;
    if (u.value > 448.0f) u.value = 448.0f;
    if (u.value < 0x1p-6f) return sign | (uint8_t)rintf(u.value * 512.0f);
    u.bits += 0x7ffff + (u.bits >> 20 & 1);
    return sign | (uint8_t)((u.bits >> 20) - (120 << 3));
}

static void encode(const Decode *p, const float *x, int64_t dim, uint8_t *to) {
    if (p->cache == AS_FLOAT32)
        memcpy(to, x, sizeof(float) * dim);
    else if (p->cache == AS_E4M3)
        for (int64_t i = 0; i < dim; i++) to[i] = e4m3_of(x[i]);
    else {
        float scale = largest_of(x, dim) / 127.0f; /* of something infinite: no number at all */
        for (int64_t i = 0; i < dim; i++) {
            float code = scale > 0 ? rintf(x[i] / scale) : 0; /* above 127 of a rounded subnormal */
            to[i] = (uint8_t)(int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
        }
        memcpy(to + dim, &scale, sizeof scale);
    }
}

/* W numbers at once; codes behind `dim` are read as well where less than W are left, so they are
 * copied. */
static void decode(const Decode *p, const uint8_t *from, int64_t dim, float *out) {
    if (p->cache == AS_FLOAT32) {
        memcpy(out, from, sizeof(float) * dim);
        return;
    }
    float scale = 1;
    if (p->cache == AS_INT8) memcpy(&scale, from + dim, sizeof scale);
    for (int64_t i = 0; i < dim; i += W) {
        uint8_t rest[W] = {0};
        const uint8_t *at = from + i;
        int64_t left = dim - i;
        if (left < W) memcpy(rest, at, left), at = rest;
        vec x;
        if (p->cache == AS_E4M3)
            x = of_float8s(1, at);
        else
            x = floats(of_int8s(at)) * scale;
        memcpy(out + i, &x, sizeof(float) * (left < W ? left : W));
    }
}

/* A query of one head. It sees tokens [from, to) of a pass. */
typedef struct {
    const float *query;
    float *sum, *most, *total;
    int from, to;
} Query;

/* Scores of n tokens become probabilities, of the largest score so far. */
static void soften(const Decode *p, const Query *q, float *scores, int n) {
    if (p->softcap != 0)
        for (int t = 0; t < n; t++) scores[t] = p->softcap * tanhf(scores[t] / p->softcap);
    float highest = *q->most, mass = 0;
    int whole = n / W * W;
    vec high = (vec){0} + highest, masses = {0};
    for (int t = 0; t < whole; t += W) {
        vec x = *(vec *)(scores + t);
        high = slipstream_choose(x > high, x, high);
    }
    for (int lane = 0; lane < W; lane++) highest = high[lane] > highest ? high[lane] : highest;
    for (int t = whole; t < n; t++) highest = scores[t] > highest ? scores[t] : highest;
    if (highest > *q->most) {
        float less = *q->most == -INFINITY ? 0.0f : slipstream_exp(*q->most - highest);
        for (int i = 0; i < p->value_dim; i++) q->sum[i] *= less;
        *q->total *= less;
        *q->most = highest;
    }
    for (int t = 0; t < whole; t += W)
        masses += *(vec *)(scores + t) = slipstream_exps(*(vec *)(scores + t) - highest);
    for (int t = whole; t < n; t++) mass += scores[t] = slipstream_exp(scores[t] - highest);
    vec4 lanes = fold(masses);
    mass += (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    *q->total += mass;
}

/* M queries, a constant, of a pass's keys and values. */
ALWAYS void attend_few(const int M, const Decode *p, const Query *of, const float *const *keys,
                       const float *const *values) {
    float scores[TOGETHER][CHUNK];
    const float *queries[TOGETHER], *probs[TOGETHER];
    float *sums_of[TOGETHER];
    int dim = (int)p->value_dim, from = of[0].from, to = of[0].to;
    int last_from = from, first_to = to;
    for (int m = 1; m < M; m++) {
        from = of[m].from < from ? of[m].from : from, to = of[m].to > to ? of[m].to : to;
        last_from = of[m].from > last_from ? of[m].from : last_from;
        first_to = of[m].to < first_to ? of[m].to : first_to;
    }
    for (int m = 0; m < M; m++) queries[m] = of[m].query;
    score(M, queries, keys + from, to - from, (int)p->key_dim, p->scale, scores);
    for (int m = 0; m < M; m++) {
        sums_of[m] = of[m].sum, probs[m] = scores[m] + of[m].from - from;
        soften(p, of + m, scores[m] + of[m].from - from, of[m].to - of[m].from);
    }
    if (last_from > first_to) last_from = first_to = to; /* they have no token in common */
    /* what one of them alone sees, then what all see, then the rest: each in its order */
    for (int m = 0; m < M; m++) {
        int end = last_from < of[m].to ? last_from : of[m].to;
        if (of[m].from == end) continue;
        gather(1, probs + m, values + of[m].from, end - of[m].from, dim, sums_of + m);
        probs[m] += end - of[m].from;
    }
    gather(M, probs, values + last_from, first_to - last_from, dim, sums_of);
    for (int m = 0; m < M; m++)
        if (of[m].to > first_to) {
            probs[m] += first_to - last_from;
            gather(1, probs + m, values + first_to, of[m].to - first_to, dim, sums_of + m);
        }
}

static int64_t first_seen(const Decode *p, int64_t len) {
    int64_t token = p->window && p->window < len ? len - p->window : 0;
    if (p->chunk && (len - 1) / p->chunk * p->chunk > token) token = (len - 1) / p->chunk * p->chunk;
    return token;
}

/* A tile's query heads [first, last): softmax in one pass, chunk by chunk
 * (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
 *
 * A row's sums are in an order that its length alone decides: chunks begin at multiples of CHUNK, or
 * with the first token that it sees. */
static void attend_tile(const Decode *p, int64_t tile, int64_t first, int64_t last) {
    int64_t row = p->tiles ? p->tiles[tile] : tile, group = p->heads / p->kv_heads;
    int num_rows = p->tiles ? (int)(p->tiles[tile + 1] - row) : 1;
    int num_heads = (int)(last - first), key_dim = (int)p->key_dim, value_dim = (int)p->value_dim;
    int is_latent = p->values == p->keys, is_coded = p->cache != AS_FLOAT32;
    int is_copied = is_coded || num_rows > 1; /* side by side, where several rows read them */
    int64_t key_bytes = bytes_of(p, key_dim);
    int64_t value_bytes = is_latent ? key_bytes : bytes_of(p, value_dim);
    /* of the chunk's tokens, for the query heads of one key head */
    float own_keys[is_copied ? CHUNK * key_dim : 1];
    float own_values[is_copied && !is_latent ? CHUNK * value_dim : 1];
    float most[num_rows * num_heads], total[num_rows * num_heads];
    int64_t token = first_seen(p, p->lens[row]), len = p->lens[row + num_rows - 1];
    const int32_t *table = p->tables + p->table_rows[row] * p->widest;
    for (int r = 0; r < num_rows; r++) {
        for (int h = 0; h < num_heads; h++) {
            most[r * num_heads + h] = p->sinks ? p->sinks[first + h] : -INFINITY;
            total[r * num_heads + h] = p->sinks ? 1.0f : 0.0f;
        }
        float *output = p->output + ((row + r) * p->heads + first) * value_dim;
        memset(output, 0, sizeof(float) * num_heads * value_dim);
    }
    while (token < len) {
        const float *keys[CHUNK], *values[CHUNK];
        int64_t slots[CHUNK], start = token, end = token / CHUNK * CHUNK + CHUNK;
        if (end > len) end = len;
        while (token < end) {
            int64_t offset = token % p->block_size;
            int64_t slot = (int64_t)table[token / p->block_size] * p->block_size + offset;
            for (; offset < p->block_size && token < end; offset++, slot++, token++)
                slots[token - start] = slot;
        }
        for (int h = 0; h < num_heads;) {
            int64_t key_head = (first + h) / group, next = (key_head + 1) * group - first;
            int behind = next < num_heads ? (int)next : num_heads;
            for (int t = 0; t < end - start; t++) {
                int64_t at = slots[t] * p->kv_heads + key_head;
                const uint8_t *key = (const uint8_t *)p->keys + at * key_bytes;
                const uint8_t *value = (const uint8_t *)p->values + at * value_bytes;
                keys[t] = (const float *)(const void *)key;
                values[t] = (const float *)(const void *)value;
                if (!is_copied) continue;
                decode(p, key, key_dim, own_keys + t * key_dim);
                keys[t] = values[t] = own_keys + t * key_dim;
                if (is_latent) continue;
                decode(p, value, value_dim, own_values + t * value_dim);
                values[t] = own_values + t * value_dim;
            }
            Query few[TOGETHER];
            int n = 0;
            for (int r = 0; r < num_rows; r++) {
                int64_t seen = p->lens[row + r], from = first_seen(p, seen);
                if (seen <= start || from >= end) continue;
                for (int own = h; own < behind; own++) {
                    int at = r * num_heads + own;
                    few[n++] = (Query){
                        p->query + (row + r) * p->query_row + (first + own) * p->query_head,
                        p->output + ((row + r) * p->heads + first + own) * value_dim,
                        most + at, total + at, from > start ? (int)(from - start) : 0,
                        (int)((seen < end ? seen : end) - start)};
                    if (n < TOGETHER) continue;
                    attend_few(TOGETHER, p, few, keys, values);
                    n = 0;
                }
            }
            for (int m = 0; m < n; m++) attend_few(1, p, few + m, keys, values);
            h = behind;
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int h = 0; h < num_heads; h++) {
            float share = 1.0f / total[r * num_heads + h];
            float *output = p->output + ((row + r) * p->heads + first + h) * value_dim;
            for (int i = 0; i < value_dim; i++) output[i] *= share;
        }
}

/* Part 0 stores all tokens' keys and values, part 1 computes attention. If there are few tiles, or
 * some are of several rows, the key heads of a tile are separate items, or some query heads of its
 * only one. */
static int64_t num_tiles(const Decode *p) { return p->tiles ? p->num_tiles : p->rows; }

static int64_t split_of(const Decode *p) {
    if (num_tiles(p) >= 8 && !p->tiles) return 1;
    return p->kv_heads > 1 ? p->kv_heads : (p->heads + FEW_HEADS - 1) / FEW_HEADS;
}

Stage slipstream_attend_stage(const Decode *p, int64_t part, int64_t after) {
    if (part == 0) {
        int64_t numbers = p->kv_heads * (p->key_dim + p->value_dim);
        return (Stage){p->tokens, slipstream_row_chunk(numbers), after};
    }
    return (Stage){num_tiles(p) * split_of(p), 1, after};
}

void slipstream_attend_work(const Decode *p, int64_t part, int64_t first, int64_t last) {
    if (part == 1) {
        int64_t split = split_of(p);
        for (int64_t item = first; item < last; item++) {
            int64_t of_tile = item % split;
            attend_tile(p, item / split, of_tile * p->heads / split,
                        (of_tile + 1) * p->heads / split);
        }
        return;
    }
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < p->kv_heads; h++) {
            int64_t index = p->slots[t] * p->kv_heads + h;
            encode(p, p->key + t * p->key_token + h * p->key_head, p->key_dim,
                   (uint8_t *)p->keys + index * bytes_of(p, p->key_dim));
            if (p->values != p->keys)
                encode(p, p->value + t * p->value_token + h * p->value_head, p->value_dim,
                       (uint8_t *)p->values + index * bytes_of(p, p->value_dim));
        }
}

static Stage attend_stage(const void *of, int64_t part) {
    return part < 2 ? slipstream_attend_stage(of, part, part + 1) : NO_STAGE;
}

static void attend_work(const void *of, int64_t part, int64_t first, int64_t last) {
    slipstream_attend_work(of, part, first, last);
}

void slipstream_attend(const Decode *p) {
    slipstream_do(&(Job){attend_stage, attend_work, p});
}

/* The small operations: `rows_of` computes rows [first, last). */
typedef struct {
    void (*rows_of)(const void *of, int64_t first, int64_t last);
    const void *of;
    int64_t rows, numbers; /* numbers: per row */
} Rows;

static Stage rows_stage(const void *of, int64_t index) {
    const Rows *r = of;
    return index ? NO_STAGE : (Stage){r->rows, slipstream_row_chunk(r->numbers), 1};
}

static void rows_work(const void *of, int64_t index, int64_t first, int64_t last) {
    const Rows *r = of;
    (void)index;
    r->rows_of(r->of, first, last);
}

static void by_row(void (*rows_of)(const void *, int64_t, int64_t), const void *of, int64_t rows,
                   int64_t numbers) {
    slipstream_do(&(Job){rows_stage, rows_work, &(Rows){rows_of, of, rows, numbers}});
}

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t x_row, dim;
    float epsilon;
} Norm;

static void norm_rows(const void *of, int64_t first, int64_t last) {
    const Norm *p = of;
    for (int64_t row = first; row < last; row++)
        slipstream_norm_row(p->x + row * p->x_row, p->weight, p->y + row * p->dim, p->dim,
                            p->epsilon);
}

/* y = weight * (x / sqrt(mean(x^2) + epsilon)) for each row; x and y are [rows, dim]. */
void slipstream_rms_norm(const float *x, int64_t x_row, const float *weight, float *y,
                         int64_t rows, int64_t dim, float epsilon) {
    by_row(norm_rows, &(Norm){x, weight, y, x_row, dim, epsilon}, rows, dim);
}

/* One row, on the calling thread. */
void slipstream_norm_row(const float *in, const float *weight, float *out, int64_t dim,
                         float epsilon) {
    float lanes[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += in[i + lane] * in[i + lane];
    for (int lane = 0; lane < 16; lane++) total += lanes[lane];
    for (; i < dim; i++) total += in[i] * in[i];
    float scale = 1.0f / sqrtf(total / (float)dim + epsilon);
    for (i = 0; i < dim; i++) out[i] = weight[i] * (in[i] * scale);
}

typedef struct {
    const float *gate, *up;
    float *y;
    int64_t gate_row, up_row, dim;
} SiluMul;

static void silu_mul_rows(const void *of, int64_t first, int64_t last) {
    const SiluMul *p = of;
    for (int64_t row = first; row < last; row++)
        slipstream_silu_mul_row(p->gate + row * p->gate_row, p->up + row * p->up_row,
                                p->y + row * p->dim, p->dim);
}

/* y = silu(gate) * up; all are [rows, dim]. */
void slipstream_silu_mul(const float *gate, int64_t gate_row, const float *up, int64_t up_row,
                         float *y, int64_t rows, int64_t dim) {
    by_row(silu_mul_rows, &(SiluMul){gate, up, y, gate_row, up_row, dim}, rows, dim);
}

/* One row, on the calling thread. */
void slipstream_silu_mul_row(const float *g, const float *u, float *out, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W)
        *(vec *)(out + i) = slipstream_silus(*(const vec *)(g + i)) * *(const vec *)(u + i);
    for (; i < dim; i++) out[i] = slipstream_silu(g[i]) * u[i];
}

void slipstream_sigmoid_row(const float *x, float *y, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) *(vec *)(y + i) = slipstream_sigmoids(*(const vec *)(x + i));
    for (; i < dim; i++) y[i] = slipstream_sigmoid(x[i]);
}

/* As torch's, which is x itself above 20. */
void slipstream_softplus_row(const float *x, float *y, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) y[i] = x[i] > 20.0f ? x[i] : log1pf(expf(x[i]));
}

typedef struct {
    void (*row)(const float *x, float *y, int64_t dim);
    const float *x;
    float *y;
    int64_t dim;
} Each;

static void each_rows(const void *of, int64_t first, int64_t last) {
    const Each *p = of;
    for (int64_t row = first; row < last; row++)
        p->row(p->x + row * p->dim, p->y + row * p->dim, p->dim);
}

/* y = sigmoid(x); both are [rows, dim]. */
void slipstream_sigmoid_of(const float *x, float *y, int64_t rows, int64_t dim) {
    by_row(each_rows, &(Each){slipstream_sigmoid_row, x, y, dim}, rows, dim);
}

/* y = softplus(x); both are [rows, dim]. */
void slipstream_softplus_of(const float *x, float *y, int64_t rows, int64_t dim) {
    by_row(each_rows, &(Each){slipstream_softplus_row, x, y, dim}, rows, dim);
}

typedef struct {
    const float *x, *cosines, *sines;
    float *y;
    int64_t x_token, x_head, heads, dim, width;
} Rotate;

static void rotate_tokens(const void *of, int64_t first, int64_t last) {
    const Rotate *p = of;
    for (int64_t t = first; t < last; t++)
        slipstream_rotate_token(p->x + t * p->x_token, p->x_head, p->cosines + t * p->width,
                                p->sines + t * p->width, p->y + t * p->heads * p->dim, p->heads,
                                p->dim, p->width);
}

/* Rotary embedding with rotated halves, as in GPT-NeoX: x is [tokens, heads, dim] with strides,
 * cosines and sines are [tokens, width], y is [tokens, heads, dim]; dimensions behind `width` stay. */
void slipstream_rotate(const float *x, int64_t x_token, int64_t x_head, const float *cosines,
                       const float *sines, float *y, int64_t tokens, int64_t heads, int64_t dim,
                      int64_t width) {
    by_row(rotate_tokens, &(Rotate){x, cosines, sines, y, x_token, x_head, heads, dim, width},
           tokens, heads * dim);
}

/* One token, on the calling thread. */
void slipstream_rotate_token(const float *x, int64_t x_head, const float *c, const float *s,
                             float *y, int64_t heads, int64_t dim, int64_t width) {
    int64_t half = width / 2;
    for (int64_t h = 0; h < heads; h++) {
        const float *a = x + h * x_head, *b = a + half;
        float *out = y + h * dim;
        for (int64_t i = 0; i < half; i++) {
            out[i] = a[i] * c[i] - b[i] * s[i];
            out[half + i] = b[i] * c[half + i] + a[i] * s[half + i];
        }
        for (int64_t i = width; i < dim; i++) out[i] = a[i];
    }
}
