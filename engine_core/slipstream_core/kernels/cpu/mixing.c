/* What mixers compute over a step's rows: a short convolution, and a recurrence over a matrix of
 * numbers for each head. Both continue from a row's state in the pool and leave it there.
 *
 * - A row's tokens are computed one after another, whatever its chunks are: the same tokens give
 *   the same bits in a chunk and in single steps, alone and beside others.
 * - A recurrence's columns do not depend on each other, so a block of them stays in L1 while it goes
 *   through a row's tokens. That makes the plain recurrence cheap enough for prompts.
 * - The state's layout is our own: the convolution's is [taps - 1, channels], the last inputs in
 *   order; the recurrence's [heads, key_dim, value_dim].
 */

#include "kernels.h"
#include "vectors.h"

#define CHANNELS 512 /* of a convolution, to an item */
#define VECTORS 4    /* of columns, to an item: as many sums hide the latency of one */
/* to an item where rows have one token each: memory is read in longer pieces, and L1 keeps none of
 * it for a next token */
#define VECTORS_OF_STEPS (W == 16 ? 8 : VECTORS) /* registers hold twice as many sums */

/* Where the row's segments begin and end, and the state that they begin with. */
typedef struct {
    int64_t first, last, slot, read;
    int begins;
} Row;

static Row row_of(const Mixing *m, int64_t row) {
    return (Row){m->segments[row], m->segments[row + 1], m->slots[row], m->reads[row], m->begins[row]};
}

/* --- the short convolution --- */

static int64_t channel_blocks(const Convolve *p) { return (p->channels + CHANNELS - 1) / CHANNELS; }

Stage slipstream_convolve_stage(const Convolve *p, int64_t after) {
    int64_t tokens = p->m->tokens[p->m->segments[p->m->rows]], rows = p->m->rows;
    int64_t numbers = p->taps * CHANNELS * (rows ? tokens / rows + 1 : 1);
    return (Stage){rows * channel_blocks(p), slipstream_row_chunk(numbers), after};
}

static void convolve_block(const Convolve *p, int64_t row, int64_t channel) {
    const Mixing *m = p->m;
    Row r = row_of(m, row);
    int64_t taps = p->taps, past = taps - 1, width = p->channels;
    int64_t n = width - channel < CHANNELS ? width - channel : CHANNELS;
    float before[past * CHANNELS + 1]; /* the inputs before the row's tokens */
    float *state = p->states + r.slot * p->state_size + channel;
    const float *old = p->states + r.read * p->state_size + channel;
    for (int64_t k = 0; k < past; k++)
        if (r.begins)
            memset(before + k * CHANNELS, 0, sizeof(float) * n);
        else
            memcpy(before + k * CHANNELS, old + k * width, sizeof(float) * n);
    int64_t start = m->tokens[r.first];
    for (int64_t s = r.first; s < r.last; s++) {
        for (int64_t t = m->tokens[s]; t < m->tokens[s + 1]; t++) {
            float *restrict out = p->output + t * width + channel;
            for (int64_t i = 0; i < n; i++) out[i] = p->bias ? p->bias[channel + i] : 0.0f;
            for (int64_t k = 0; k < taps; k++) {
                int64_t at = t - past + k;
                const float *in = at < start ? before + (at - start + past) * CHANNELS
                                             : p->x + at * p->x_token + channel;
                const float *weight = p->weight + k * width + channel;
                for (int64_t i = 0; i < n; i++) out[i] += weight[i] * in[i];
            }
            int64_t i = p->activates ? 0 : n;
            for (; i + W <= n; i += W) *(vec *)(out + i) = slipstream_silus(*(vec *)(out + i));
            for (; i < n; i++) out[i] = slipstream_silu(out[i]);
        }
        int is_last = s + 1 == r.last;
        float *kept[2] = {is_last ? state : 0,
                          m->saved[s] < 0 ? 0 : p->states + m->saved[s] * p->state_size + channel};
        for (int64_t k = 0; k < past; k++) {
            int64_t at = m->tokens[s + 1] - past + k;
            const float *in = at < start ? before + (at - start + past) * CHANNELS
                                         : p->x + at * p->x_token + channel;
            for (int i = 0; i < 2; i++)
                if (kept[i]) memcpy(kept[i] + k * width, in, sizeof(float) * n);
        }
    }
}

void slipstream_convolve_work(const Convolve *p, int64_t first, int64_t last) {
    int64_t blocks = channel_blocks(p);
    for (int64_t item = first; item < last; item++)
        convolve_block(p, item / blocks, item % blocks * CHANNELS);
}

/* --- the recurrence --- */

/* Of a token and head: what all its columns share. */
typedef struct {
    const float *query, *key, *decayed; /* [key_dim]; decayed: key * decay */
    const float *decay;                 /* [key_dim] */
    const float *value, *skip;
    float *output;
    float strength;
} Token;

/* One token, `count` vectors of columns, of which `old` has rows `row` floats apart, and `state` gets
 * them; these may be the same. */
static inline __attribute__((always_inline)) void columns(const int count, const Recur *p,
                                                          const Token *t, const float *old,
                                                          float *state) {
    int64_t keys = p->key_dim, row = p->value_dim;
    vec change[count], out[count];
    for (int v = 0; v < count; v++) change[v] = *(const vec *)(t->value + v * W);
    if (p->is_delta) {
        vec seen[count];
        for (int v = 0; v < count; v++) seen[v] = (vec){0};
        for (int64_t i = 0; i < keys; i++)
#pragma GCC unroll 8
            for (int v = 0; v < count; v++)
                seen[v] += t->decayed[i] * *(const vec *)(old + i * row + v * W);
        for (int v = 0; v < count; v++) change[v] -= seen[v];
    }
    for (int v = 0; v < count; v++) change[v] *= t->strength, out[v] = (vec){0};
    for (int64_t i = 0; i < keys; i++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
            int64_t at = i * row + v * W;
            vec next = t->decay[i] * *(const vec *)(old + at) + t->key[i] * change[v];
            *(vec *)(state + at) = next;
            out[v] += t->query[i] * next;
        }
    for (int v = 0; v < count; v++) {
        if (t->skip) out[v] += *t->skip * *(const vec *)(t->value + v * W);
        *(vec *)(t->output + v * W) = out[v];
    }
}

/* Columns that fill no vector. */
static void column(const Recur *p, const Token *t, const float *old, float *state, int64_t at) {
    float change = t->value[at], out = 0;
    if (p->is_delta) {
        float seen = 0;
        for (int64_t i = 0; i < p->key_dim; i++)
            seen += t->decayed[i] * old[i * p->value_dim + at];
        change -= seen;
    }
    change *= t->strength;
    for (int64_t i = 0; i < p->key_dim; i++) {
        float *each = state + i * p->value_dim + at;
        *each = t->decay[i] * old[i * p->value_dim + at] + t->key[i] * change;
        out += t->query[i] * *each;
    }
    t->output[at] = t->skip ? out + *t->skip * t->value[at] : out;
}

/* Columns of an item. */
static int64_t block_of(const Recur *p) {
    const Mixing *m = p->m;
    return W * (m->tokens[m->segments[m->rows]] == m->rows ? VECTORS_OF_STEPS : VECTORS);
}

static int64_t column_blocks(const Recur *p) {
    return (p->value_dim + block_of(p) - 1) / block_of(p);
}

Stage slipstream_recur_stage(const Recur *p, int64_t after) {
    int64_t items = p->m->rows * p->heads * column_blocks(p), width = block_of(p);
    if (width > p->value_dim) width = p->value_dim;
    return (Stage){items, slipstream_row_chunk(p->key_dim * width), after};
}

/* key / |key|, times `scale`. */
static void prepare(const Recur *p, const float *in, float scale, float *out) {
    int64_t dim = p->key_dim;
    if (p->epsilon >= 0) {
        float lanes[W] = {0}, total = 0;
        int64_t i = 0;
        for (; i + W <= dim; i += W)
            for (int lane = 0; lane < W; lane++) lanes[lane] += in[i + lane] * in[i + lane];
        for (int lane = 0; lane < W; lane++) total += lanes[lane];
        for (; i < dim; i++) total += in[i] * in[i];
        scale *= 1.0f / sqrtf(total + p->epsilon);
    }
    for (int64_t i = 0; i < dim; i++) out[i] = in[i] * scale;
}

static void exponentials(const float *in, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) *(vec *)(out + i) = slipstream_exps(*(const vec *)(in + i));
    for (; i < n; i++) out[i] = slipstream_exp(in[i]);
}

static void recur_block(const Recur *p, int64_t row, int64_t head, int64_t first, int64_t width) {
    const Mixing *m = p->m;
    Row r = row_of(m, row);
    int64_t dim = p->key_dim, columns_of = p->value_dim, key_head = head * p->key_heads / p->heads;
    float query[dim], key[dim], decay[dim], decayed[dim];
    int64_t offset = head * dim * columns_of + first;
    float *state = p->states + r.slot * p->state_size + offset;
    const float *old = r.begins ? state : p->states + r.read * p->state_size + offset;
    if (r.begins)
        for (int64_t i = 0; i < dim; i++)
            memset(state + i * columns_of, 0, sizeof(float) * width);
    for (int64_t s = r.first; s < r.last; s++) {
        for (int64_t at = m->tokens[s]; at < m->tokens[s + 1]; at++) {
            prepare(p, p->query + at * p->query_token + key_head * dim, p->scale, query);
            prepare(p, p->key + at * p->key_token + key_head * dim, 1.0f, key);
            const float *logs = p->decay ? p->decay + at * p->decay_token : 0;
            float strength = p->strength ? p->strength[at * p->strength_token + head] : 1.0f;
            if (!logs) {
                for (int64_t i = 0; i < dim; i++) decayed[i] = p->rates[head * dim + i] * strength;
                exponentials(decayed, decay, dim);
            } else if (p->decays_by_key)
                exponentials(logs + head * dim, decay, dim);
            else {
                float log = logs[head];
                if (p->rates && at - m->tokens[r.first] < m->prompts[row] &&
                    (strength < p->least || strength > p->most)) {
                    strength = strength < p->least ? p->least : p->most;
                    log = p->rates[head] * strength;
                }
                float same = slipstream_exp(log);
                for (int64_t i = 0; i < dim; i++) decay[i] = same;
            }
            for (int64_t i = 0; i < dim; i++) decayed[i] = decay[i] * key[i];
            Token t = {query,
                       key,
                       decayed,
                       decay,
                       p->value + at * p->value_token + head * columns_of + first,
                       p->skip ? p->skip + head : 0,
                       p->output + (at * p->heads + head) * columns_of + first,
                       strength};
            int64_t done = 0;
            if (width == VECTORS_OF_STEPS * W)
                columns(VECTORS_OF_STEPS, p, &t, old, state), done = width;
            else if (width == VECTORS * W)
                columns(VECTORS, p, &t, old, state), done = width;
            else
                for (; done + W <= width; done += W) {
                    Token part = t;
                    part.value += done, part.output += done;
                    columns(1, p, &part, old + done, state + done);
                }
            for (; done < width; done++) column(p, &t, old, state, done);
            old = state;
        }
        if (m->saved[s] >= 0) {
            float *saved = p->states + m->saved[s] * p->state_size + offset;
            for (int64_t i = 0; i < dim; i++)
                memcpy(saved + i * columns_of, state + i * columns_of, sizeof(float) * width);
        }
    }
}

void slipstream_recur_work(const Recur *p, int64_t first, int64_t last) {
    int64_t blocks = column_blocks(p), size = block_of(p);
    for (int64_t item = first; item < last; item++) {
        int64_t at = item % blocks * size, left = p->value_dim - at, of = item / blocks;
        recur_block(p, of / p->heads, of % p->heads, at, left < size ? left : size);
    }
}

static Stage convolve_stage(const void *of, int64_t index) {
    return index ? NO_STAGE : slipstream_convolve_stage(of, 1);
}

static void convolve_work(const void *of, int64_t index, int64_t first, int64_t last) {
    (void)index;
    slipstream_convolve_work(of, first, last);
}

static Stage recur_stage(const void *of, int64_t index) {
    return index ? NO_STAGE : slipstream_recur_stage(of, 1);
}

static void recur_work(const void *of, int64_t index, int64_t first, int64_t last) {
    (void)index;
    slipstream_recur_work(of, first, last);
}

void slipstream_convolve(const Convolve *p) { slipstream_do(&(Job){convolve_stage, convolve_work, p}); }

void slipstream_recur(const Recur *p) { slipstream_do(&(Job){recur_stage, recur_work, p}); }
