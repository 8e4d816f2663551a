/* Float32 kernels for CPUs: attention of decode rows over the paged cache, and the small
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
#define FEW_HEADS 8  /* query heads to an item, if all have the same keys */

static inline vec4 fold(vec x) {
    vec4 parts[W / 4];
    memcpy(parts, &x, sizeof x);
    vec4 sum = parts[0];
    for (int i = 1; i < W / 4; i++) sum += parts[i];
    return sum;
}

/* The sums of four vectors' lanes, side by side. */
static inline vec4 sums(vec4 a, vec4 b, vec4 c, vec4 d) {
    vec4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    vec4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

/* scores[i] = query . keys[i] * scale for n tokens; keys[i] points to the key of token i. */
static void score(const float *query, const float *const *keys, int n, int dim, float scale,
                  float *scores) {
    int whole = dim - dim % W;
    int t = 0;
    for (; t + 4 <= n; t += 4) {
        const float *k0 = keys[t], *k1 = keys[t + 1], *k2 = keys[t + 2], *k3 = keys[t + 3];
        vec a = {0}, b = {0}, c = {0}, d = {0};
        for (int i = 0; i < whole; i += W) {
            vec q = *(const vec *)(query + i);
            a += q * *(const vec *)(k0 + i);
            b += q * *(const vec *)(k1 + i);
            c += q * *(const vec *)(k2 + i);
            d += q * *(const vec *)(k3 + i);
        }
        vec4 dots = sums(fold(a), fold(b), fold(c), fold(d));
        for (int i = whole; i < dim; i++) {
            vec4 rest = {k0[i], k1[i], k2[i], k3[i]};
            dots += rest * query[i];
        }
        *(vec4 *)(scores + t) = dots * scale;
    }
    for (; t < n; t++) {
        vec a = {0};
        for (int i = 0; i < whole; i += W) a += *(const vec *)(query + i) * *(const vec *)(keys[t] + i);
        vec4 lanes = fold(a);
        float dot = lanes[0] + lanes[1] + lanes[2] + lanes[3];
        for (int i = whole; i < dim; i++) dot += query[i] * keys[t][i];
        scores[t] = dot * scale;
    }
}

/* sum[:] += probs[i] * values[i][:] over n tokens. */
static void gather(const float *probs, const float *const *values, int n, int dim, float *sum) {
    int i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) {
        vec *at = (vec *)(sum + i);
        vec a = at[0], b = at[1], c = at[2], d = at[3];
        for (int t = 0; t < n; t++) {
            const vec *v = (const vec *)(values[t] + i);
            a += probs[t] * v[0];
            b += probs[t] * v[1];
            c += probs[t] * v[2];
            d += probs[t] * v[3];
        }
        at[0] = a, at[1] = b, at[2] = c, at[3] = d;
    }
    for (; i + W <= dim; i += W) {
        vec a = *(vec *)(sum + i);
        for (int t = 0; t < n; t++) a += probs[t] * *(const vec *)(values[t] + i);
        *(vec *)(sum + i) = a;
    }
    for (; i < dim; i++)
        for (int t = 0; t < n; t++) sum[i] += probs[t] * values[t][i];
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

/* One row's query heads [first, last): softmax in one pass, chunk by chunk
 * (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). */
static void attend_row(const Decode *p, int64_t row, int64_t first, int64_t last) {
    int64_t group = p->heads / p->kv_heads, key_head = first / group;
    int num_heads = (int)(last - first), key_dim = (int)p->key_dim, value_dim = (int)p->value_dim;
    int is_coded = p->cache != AS_FLOAT32, is_latent = p->values == p->keys;
    int64_t key_bytes = bytes_of(p, key_dim);
    int64_t value_bytes = is_latent ? key_bytes : bytes_of(p, value_dim);
    /* of the chunk's tokens, decoded for the query heads of one key head */
    float decoded_keys[is_coded ? CHUNK * key_dim : 1];
    float decoded_values[is_coded && !is_latent ? CHUNK * value_dim : 1];
    int64_t len = p->lens[row], token = p->window && p->window < len ? len - p->window : 0;
    if (p->chunk && (len - 1) / p->chunk * p->chunk > token) token = (len - 1) / p->chunk * p->chunk;
    const int32_t *table = p->tables + p->table_rows[row] * p->widest;
    const float *sinks = p->sinks ? p->sinks + first : NULL;
    float *output = p->output + (row * p->heads + first) * value_dim;
    const float *query = p->query + row * p->query_row + first * p->query_head;
    float most[num_heads], total[num_heads];
    for (int h = 0; h < num_heads; h++) {
        most[h] = sinks ? sinks[h] : -INFINITY;
        total[h] = sinks ? 1.0f : 0.0f;
    }
    memset(output, 0, sizeof(float) * num_heads * value_dim);
    while (token < len) {
        const float *keys[CHUNK], *values[CHUNK];
        const uint8_t *key_at[CHUNK], *value_at[CHUNK];
        float scores[CHUNK];
        int n = 0;
        while (n < CHUNK && token < len) {
            int64_t offset = token % p->block_size;
            int64_t slot = (int64_t)table[token / p->block_size] * p->block_size + offset;
            for (; offset < p->block_size && n < CHUNK && token < len; offset++, slot++, token++) {
                int64_t at = slot * p->kv_heads + key_head;
                key_at[n] = (const uint8_t *)p->keys + at * key_bytes;
                value_at[n++] = (const uint8_t *)p->values + at * value_bytes;
            }
        }
        for (int h = 0; h < num_heads; h++) {
            if (h == 0 || (first + h) % group == 0)
                for (int t = 0; t < n; t++) {
                    if (h) key_at[t] += key_bytes, value_at[t] += value_bytes;
                    keys[t] = (const float *)(const void *)key_at[t];
                    values[t] = (const float *)(const void *)value_at[t];
                    if (!is_coded) continue;
                    decode(p, key_at[t], key_dim, decoded_keys + t * key_dim);
                    keys[t] = values[t] = decoded_keys + t * key_dim;
                    if (is_latent) continue;
                    decode(p, value_at[t], value_dim, decoded_values + t * value_dim);
                    values[t] = decoded_values + t * value_dim;
                }
            score(query + h * p->query_head, keys, n, key_dim, p->scale, scores);
            if (p->softcap != 0)
                for (int t = 0; t < n; t++) scores[t] = p->softcap * tanhf(scores[t] / p->softcap);
            float highest = most[h];
            for (int t = 0; t < n; t++) highest = scores[t] > highest ? scores[t] : highest;
            float *sum = output + h * value_dim;
            if (highest > most[h]) {
                float less = most[h] == -INFINITY ? 0.0f : slipstream_exp(most[h] - highest);
                for (int i = 0; i < value_dim; i++) sum[i] *= less;
                total[h] *= less;
                most[h] = highest;
            }
            int done = 0;
            for (; done + W <= n; done += W)
                *(vec *)(scores + done) = slipstream_exps(*(vec *)(scores + done) - highest);
            for (; done < n; done++) scores[done] = slipstream_exp(scores[done] - highest);
            float mass = 0;
            for (int t = 0; t < n; t++) mass += scores[t];
            total[h] += mass;
            gather(scores, values, n, value_dim, sum);
        }
    }
    for (int h = 0; h < num_heads; h++) {
        float share = 1.0f / total[h];
        for (int i = 0; i < value_dim; i++) output[h * value_dim + i] *= share;
    }
}

/* Part 0 stores all tokens' keys and values, part 1 computes attention of the decode rows. If there
 * are few rows, the key heads of a row are separate items, or some query heads of its only one. */
static int64_t split_of(const Decode *p) {
    if (p->rows >= 8) return 1;
    return p->kv_heads > 1 ? p->kv_heads : (p->heads + FEW_HEADS - 1) / FEW_HEADS;
}

Stage slipstream_attend_stage(const Decode *p, int64_t part, int64_t after) {
    if (part == 0) {
        int64_t numbers = p->kv_heads * (p->key_dim + p->value_dim);
        return (Stage){p->tokens, slipstream_row_chunk(numbers), after};
    }
    return (Stage){p->rows * split_of(p), 1, after};
}

void slipstream_attend_work(const Decode *p, int64_t part, int64_t first, int64_t last) {
    if (part == 1) {
        int64_t split = split_of(p);
        for (int64_t item = first; item < last; item++) {
            int64_t of_row = item % split;
            attend_row(p, item / split, of_row * p->heads / split, (of_row + 1) * p->heads / split);
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
