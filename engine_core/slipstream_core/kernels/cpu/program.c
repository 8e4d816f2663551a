/* A list of operations over rows, run by the team in one call.
 *
 * A decode step of a small model is some dozens of operations that take microseconds each. Calling
 * them one by one, and waking the team for each, would cost more than computing them.
 *
 * A value is part of a buffer [rows, width]: a pointer to its first number in the first row, with
 * the buffer's width as the row stride. Consecutive operations by row are fused: each row goes
 * through all of them (`together` marks an operation that is fused with the next).
 *
 * A sum over ranks is made by one thread, while the others wait as for any stage of one chunk. Where
 * it fails, as another rank has not come in time, the list ends there.
 */

#include "kernels.h"

#include <math.h>
#include <string.h>
#include <time.h>

enum {
    NORM,
    PRODUCT,
    ROTATE,
    ATTEND,
    ADD,
    SILU_MUL,
    SUM,
    MUL,
    SIGMOID,
    SOFTPLUS,
    COPY,
    CONVOLVE,
    RECUR,
    SCALE,
    ADAPT,
    ROUTE,
    EXPERTS,
    RELU
};

enum { ACTIVATES = 1, IS_DELTA = 2, DECAYS_BY_KEY = 4 }; /* flags: convolve; recur */

#define STAGES 8 /* numbers of stages that an operation has */

typedef struct {
    int64_t buffer, at; /* at: offset in a row; buffer -1: no value */
} Part;

typedef struct {
    int64_t kind, together;
    Part a, b, c, out;   /* product: x, -, more; rotate: x, cosines, sines; attend, recur: q, k, v */
    Part d, e;           /* recur: decay, strength; experts: d is scratch */
    const float *weight; /* norm; product: packed; add, mul: [n], in place of b; recur: skip;
                          * experts: an Experts, of which the rows' fields are filled in here */
    const float *bias;   /* product, convolve, route; attend: sinks; recur: rates */
    int64_t n, k;        /* product; convolve: channels, taps; others: n numbers per row, or per head;
                          * rotate: k of them turn; sum: all of a row */
    int64_t heads, kv_heads, key_dim, value_dim; /* heads: norm, rotate, copy, scale,
                                                  * attend, recur;
                                                  * route: groups, chosen, best of each */
    int64_t layer, window; /* layer: of the cache; convolve, recur: number of the state; adapt: site */
    int64_t step, flags;   /* step: floats from one of a's heads to the next: norm, copy;
                            * route: scores, weighs */
    int64_t format;        /* product: of its weight */
    float number, softcap; /* norm: epsilon; attend, recur, route: scale; softcap of recur and
                            * route: epsilon */
    float least, most;     /* recur */
} Operation;

typedef struct {
    const Operation *operations;
    int64_t count, rows;
    float *const *buffers;
    const int64_t *widths;
    void *const *caches; /* by layer: keys, values */
    const Decode *decode; /* the fields that are the same for all layers: slots, tables, lengths */
    int (*sum)(void *exchange, const float *x, float *y, int64_t n); /* of ranks; not 0: failed */
    void *exchange;
    int *failed;
    const Mixing *mixing;
    float *const *states; /* by number: [slots, state_sizes] */
    const int64_t *state_sizes;
    int64_t *begun; /* [count + 1] or NULL: when each operation began, in ns, then the end; of those
                     * that are fused, the first */
    const int32_t *adapters; /* [rows], -1: none; NULL: no row has one */
    const Adapted *adapted;  /* [adapters, sites] */
    int64_t sites;
} Run;

#define AT(part) (r->buffers[o->part.buffer] + o->part.at)
#define ROW(part) (o->part.buffer < 0 ? 0 : r->widths[o->part.buffer])

static Product product_of(const Run *r, const Operation *o) {
    return (Product){AT(a), ROW(a), o->weight, o->bias, o->c.buffer < 0 ? 0 : AT(c), ROW(c),
                     AT(out), ROW(out), r->rows, o->n, o->k, o->format};
}

static Decode decode_of(const Run *r, const Operation *o) {
    Decode d = *r->decode;
    d.query = AT(a), d.query_row = ROW(a), d.query_head = o->key_dim;
    d.key = AT(b), d.key_token = ROW(b), d.key_head = o->key_dim;
    d.value = AT(c), d.value_token = ROW(c), d.value_head = o->value_dim;
    d.keys = r->caches[2 * o->layer], d.values = r->caches[2 * o->layer + 1];
    d.output = AT(out), d.sinks = o->bias;
    d.heads = o->heads, d.kv_heads = o->kv_heads;
    d.key_dim = o->key_dim, d.value_dim = o->value_dim;
    d.chunk = 0, d.window = o->window, d.scale = o->number, d.softcap = o->softcap;
    return d;
}

static Convolve convolve_of(const Run *r, const Operation *o) {
    return (Convolve){r->mixing, AT(a), ROW(a), o->weight, o->bias, AT(out), r->states[o->layer],
                      r->state_sizes[o->layer], o->n, o->k, o->flags & ACTIVATES};
}

static Recur recur_of(const Run *r, const Operation *o) {
    return (Recur){.m = r->mixing,
                   .query = AT(a), .query_token = ROW(a),
                   .key = AT(b), .key_token = ROW(b),
                   .value = AT(c), .value_token = ROW(c),
                   .decay = o->d.buffer < 0 ? 0 : AT(d), .decay_token = ROW(d),
                   .strength = o->e.buffer < 0 ? 0 : AT(e), .strength_token = ROW(e),
                   .skip = o->weight, .rates = o->bias, .output = AT(out),
                   .states = r->states[o->layer], .state_size = r->state_sizes[o->layer],
                   .key_heads = o->kv_heads, .heads = o->heads,
                   .key_dim = o->key_dim, .value_dim = o->value_dim,
                   .is_delta = o->flags & IS_DELTA, .decays_by_key = o->flags & DECAYS_BY_KEY,
                   .scale = o->number, .epsilon = o->softcap,
                   .least = o->least, .most = o->most};
}

static Adapt adapt_of(const Run *r, const Operation *o) {
    return (Adapt){AT(a), ROW(a), AT(out), ROW(out), r->rows, o->k, o->n,
                   r->adapters, r->adapted + o->layer, r->sites};
}

/* a: x; b: weights; c: ids. */
static Experts experts_of(const Run *r, const Operation *o) {
    Experts p = *(const Experts *)(const void *)o->weight;
    p.x = AT(a), p.x_row = ROW(a);
    p.weights = AT(b), p.weights_row = ROW(b);
    p.ids = AT(c), p.ids_row = ROW(c);
    p.y = AT(out), p.y_row = ROW(out);
    p.scratch = AT(d);
    p.rows = r->rows;
    return p;
}

/* n: experts; k: chosen. Weights and, behind them, ids. */
static Route route_of(const Operation *o) {
    return (Route){.bias = o->bias, .experts = o->n, .chosen = o->k, .scores = o->step,
                   .weighs = o->flags, .groups = o->heads, .chosen_groups = o->kv_heads,
                   .best_of_group = o->key_dim, .scale = o->number, .epsilon = o->softcap};
}

/* Compute row t of an operation by row but ADAPT. */
static void of_row(const Run *r, const Operation *o, int64_t t) {
    const float *a = AT(a) + t * ROW(a);
    float *out = AT(out) + t * ROW(out);
    switch (o->kind) {
    case NORM:
        for (int64_t h = 0; h < o->heads; h++)
            slipstream_norm_row(a + h * o->step, o->weight, out + h * o->n, o->n, o->number);
        break;
    case ROTATE:
        slipstream_rotate_token(a, o->n, AT(b) + t * ROW(b), AT(c) + t * ROW(c), out, o->heads,
                                o->n, o->k);
        break;
    case ADD: {
        const float *b = o->b.buffer < 0 ? o->weight : AT(b) + t * ROW(b);
        for (int64_t i = 0; i < o->n; i++) out[i] = a[i] + b[i];
        break;
    }
    case MUL: {
        const float *b = o->b.buffer < 0 ? o->weight : AT(b) + t * ROW(b);
        for (int64_t i = 0; i < o->n; i++) out[i] = a[i] * b[i];
        break;
    }
    case SIGMOID:
        slipstream_sigmoid_row(a, out, o->n);
        break;
    case SOFTPLUS:
        slipstream_softplus_row(a, out, o->n);
        break;
    case RELU: /* NaN stays */
        for (int64_t i = 0; i < o->n; i++) out[i] = a[i] < 0.0f ? 0.0f : a[i];
        break;
    case SCALE: /* each head by a number of its own */
        for (int64_t h = 0; h < o->heads; h++) {
            float factor = (AT(b) + t * ROW(b))[h];
            for (int64_t i = 0; i < o->n; i++) out[h * o->n + i] = a[h * o->n + i] * factor;
        }
        break;
    case COPY:
        for (int64_t h = 0; h < o->heads; h++)
            memcpy(out + h * o->n, a + h * o->step, sizeof(float) * o->n);
        break;
    case ROUTE: {
        Route route = route_of(o);
        slipstream_route_row(&route, a, out, out + o->k);
        break;
    }
    case SILU_MUL:
        slipstream_silu_mul_row(a, AT(b) + t * ROW(b), out, o->n);
        break;
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* A stage's index is STAGES times its operation's index, plus the number of its stage: attention has
 * two, experts have more. Fused operations are one stage. */
static int64_t chain_end(const Run *r, int64_t at) {
    while (r->operations[at].together) at++;
    return at + 1;
}

static Stage stage(const void *of, int64_t index) {
    const Run *r = of;
    int64_t at = index / STAGES, behind = (at + 1) * STAGES;
    if (r->begun && index % STAGES == 0) r->begun[at] = now_ns();
    if (at == r->count || *r->failed) return NO_STAGE;
    const Operation *o = r->operations + at;
    if (o->kind == PRODUCT) {
        Product p = product_of(r, o);
        return slipstream_product_stage(&p, behind);
    }
    if (o->kind == ATTEND) {
        Decode d = decode_of(r, o);
        return slipstream_attend_stage(&d, index % STAGES, index % STAGES ? behind : index + 1);
    }
    if (o->kind == CONVOLVE) {
        Convolve c = convolve_of(r, o);
        return slipstream_convolve_stage(&c, behind);
    }
    if (o->kind == RECUR) {
        Recur c = recur_of(r, o);
        return slipstream_recur_stage(&c, behind);
    }
    if (o->kind == EXPERTS) {
        Experts e = experts_of(r, o);
        int64_t part = index % STAGES;
        return slipstream_experts_stage(&e, part, part + 1 < EXPERT_STAGES ? index + 1 : behind);
    }
    if (o->kind == SUM) return (Stage){1, 1, behind, 1};
    int64_t end = chain_end(r, at), numbers = 0, adapts = 0;
    for (; o < r->operations + end; o++)
        if (o->kind != ADAPT)
            numbers += o->n * (o->heads ? o->heads : 1);
        else
            adapts |= r->adapters != 0;
    if (adapts) return (Stage){r->rows, slipstream_adapt_chunk(r->rows), STAGES * end};
    return (Stage){r->rows, slipstream_row_chunk(numbers), STAGES * end};
}

static void work(const void *of, int64_t index, int64_t first, int64_t last) {
    const Run *r = of;
    const Operation *o = r->operations + index / STAGES;
    if (o->kind == PRODUCT) {
        Product p = product_of(r, o);
        slipstream_product_work(&p, first, last);
    } else if (o->kind == ATTEND) {
        Decode d = decode_of(r, o);
        slipstream_attend_work(&d, index % STAGES, first, last);
    } else if (o->kind == CONVOLVE) {
        Convolve c = convolve_of(r, o);
        slipstream_convolve_work(&c, first, last);
    } else if (o->kind == RECUR) {
        Recur c = recur_of(r, o);
        slipstream_recur_work(&c, first, last);
    } else if (o->kind == EXPERTS) {
        Experts e = experts_of(r, o);
        slipstream_experts_work(&e, index % STAGES, first, last);
    } else if (o->kind == SUM) {
        *r->failed = r->sum(r->exchange, AT(a), AT(out), r->rows * o->n);
    } else {
        const Operation *end = r->operations + chain_end(r, index / STAGES);
        while (o < end) { /* changes of several rows at a time; between them row by row */
            if (o->kind == ADAPT) {
                Adapt a = adapt_of(r, o++);
                if (a.adapters) slipstream_adapt_rows(&a, first, last);
                continue;
            }
            const Operation *next = o;
            while (next < end && next->kind != ADAPT) next++;
            for (int64_t t = first; t < last; t++)
                for (const Operation *each = o; each < next; each++) of_row(r, each, t);
            o = next;
        }
    }
}

/* 0, or what a sum that failed has returned. */
int slipstream_run(Run *r) {
    int failed = 0;
    r->failed = &failed;
    slipstream_do(&(Job){stage, work, r});
    return failed;
}
