/* Mixtures of experts: which of them a row goes to, and the weighted sum of what these make of it.
 *
 * The choices of all rows are sorted by expert, so an expert's panels are read once for all of its
 * rows. Its products are those of products.c, of float32 and of codes alike.
 *
 * - An expert's result for a row, and the order in which a row's experts are summed, that of the
 *   row's choices, do not depend on other rows.
 */

#include "kernels.h"

#include <math.h>
#include <string.h>

enum { LOGITS, SOFTMAX, SIGMOID };           /* what experts are chosen by */
enum { BY_SCORE, BY_SHARE, BY_SOFTMAX };     /* weights of those chosen */
enum { SILU, GELU, TANH_GELU, CLAMPED_SWIGLU }; /* of a gate */

/* Number of the largest, the first of equal ones; of numbers that are no order, some. */
static int64_t largest(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best] || (isnan(x[best]) && !isnan(x[i]))) best = i;
    return best;
}

static void softmax(float *x, int64_t n) {
    float most = x[largest(x, n)], total = 0;
    for (int64_t i = 0; i < n; i++) x[i] = slipstream_exp(x[i] - most), total += x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= total;
}

/* Leave the experts of the best groups; `by` of the others becomes -infinity. */
static void keep_groups(const Route *r, float *by) {
    int64_t each = r->experts / r->groups;
    float sums[r->groups], mine[each];
    for (int64_t g = 0; g < r->groups; g++) {
        memcpy(mine, by + g * each, sizeof mine);
        sums[g] = 0;
        for (int64_t i = 0; i < r->best_of_group; i++) {
            int64_t best = largest(mine, each);
            sums[g] += mine[best];
            mine[best] = -INFINITY;
        }
    }
    uint8_t kept[r->groups];
    memset(kept, 0, sizeof kept);
    for (int64_t i = 0; i < r->chosen_groups; i++) {
        int64_t best = largest(sums, r->groups);
        kept[best] = 1;
        sums[best] = -INFINITY;
    }
    for (int64_t i = 0; i < r->experts; i++)
        if (!kept[i / each]) by[i] = -INFINITY;
}

void slipstream_route_row(const Route *r, const float *logits, float *weights, float *ids) {
    const int64_t n = r->experts;
    float scores[n], by[n];
    uint8_t taken[n];
    memcpy(scores, logits, sizeof scores);
    if (r->scores == SOFTMAX) softmax(scores, n);
    for (int64_t i = 0; i < n && r->scores == SIGMOID; i++)
        scores[i] = slipstream_sigmoid(scores[i]);
    for (int64_t i = 0; i < n; i++) by[i] = r->bias ? scores[i] + r->bias[i] : scores[i];
    if (r->groups > 1) keep_groups(r, by);
    memset(taken, 0, sizeof taken);
    for (int64_t c = 0; c < r->chosen; c++) {
        int64_t best = -1; /* an expert once, whatever the numbers are */
        for (int64_t i = 0; i < n; i++)
            if (!taken[i] && (best < 0 || by[i] > by[best])) best = i;
        taken[best] = 1;
        weights[c] = scores[best], ids[c] = (float)best;
    }
    if (r->weighs == BY_SOFTMAX) softmax(weights, r->chosen);
    if (r->weighs == BY_SHARE) {
        float total = 0;
        for (int64_t c = 0; c < r->chosen; c++) total += weights[c];
        for (int64_t c = 0; c < r->chosen; c++) weights[c] /= total + r->epsilon;
    }
    for (int64_t c = 0; c < r->chosen; c++) weights[c] *= r->scale;
}

static Stage route_stage(const void *of, int64_t index) {
    const Route *r = of;
    return index ? NO_STAGE : (Stage){r->rows, slipstream_row_chunk(r->experts * r->chosen), 1};
}

static void route_work(const void *of, int64_t index, int64_t first, int64_t last) {
    const Route *r = of;
    (void)index;
    for (int64_t t = first; t < last; t++)
        slipstream_route_row(r, r->logits + t * r->logits_row, r->chosen_weights + t * r->chosen,
                             r->ids + t * r->chosen);
}

void slipstream_route(const Route *r) { slipstream_do(&(Job){route_stage, route_work, r}); }

/* The parts of a job's scratch. A choice's place is where its row is among those sorted by expert. */
typedef struct {
    int32_t *places;           /* [rows * chosen] */
    int32_t *tokens;           /* [rows * chosen]: by place */
    int32_t *starts;           /* [experts + 1]: each expert's first place */
    int32_t *ups, *downs;      /* [experts + 1]: each expert's first item of these products */
    float *outer;              /* [rows * chosen, max(k, n)]: inputs, then results */
    float *both;               /* [rows * chosen, 2 * inner]: activated in its first half */
} Parts;

static int64_t outer_width(const Experts *p) { return p->k > p->n ? p->k : p->n; }

static int64_t up_width(const Experts *p) { return p->is_gated ? 2 * p->inner : p->inner; }

/* Floats of scratch for a row; also enough for one row. */
int64_t slipstream_experts_scratch(const Experts *p) {
    return p->chosen * (2 + outer_width(p) + up_width(p)) + 3 * (p->experts + 1) + 32;
}

static Parts parts_of(const Experts *p) {
    Parts s;
    int64_t choices = p->rows * p->chosen;
    s.outer = p->scratch;
    s.both = s.outer + choices * outer_width(p);
    s.places = (int32_t *)(void *)(s.both + choices * up_width(p));
    s.tokens = s.places + choices;
    s.starts = s.tokens + choices;
    s.ups = s.starts + p->experts + 1;
    s.downs = s.ups + p->experts + 1;
    return s;
}

static Product up_of(const Experts *p, const Parts *s, int64_t e) {
    int64_t first = s->starts[e], width = up_width(p);
    int is_one = p->rows == 1; /* all of its experts read the row where it is */
    return (Product){.x = is_one ? p->x : s->outer + first * p->k,
                     .x_row = p->k,
                     .packed = (const uint8_t *)p->up + e * p->up_bytes,
                     .bias = p->up_bias ? p->up_bias + e * width : 0,
                     .y = s->both + first * width,
                     .y_row = width,
                     .rows = s->starts[e + 1] - first,
                     .n = width,
                     .k = p->k,
                     .format = p->up_format};
}

static Product down_of(const Experts *p, const Parts *s, int64_t e) {
    int64_t first = s->starts[e], width = up_width(p);
    return (Product){.x = s->both + first * width,
                     .x_row = width,
                     .packed = (const uint8_t *)p->down + e * p->down_bytes,
                     .bias = p->down_bias ? p->down_bias + e * p->n : 0,
                     .y = s->outer + first * p->n,
                     .y_row = p->n,
                     .rows = s->starts[e + 1] - first,
                     .n = p->n,
                     .k = p->inner,
                     .format = p->down_format};
}

/* A choice that is none would read elsewhere: the nearest expert instead. */
static int64_t choice(const Experts *p, int64_t t, int64_t c) {
    float id = p->ids[t * p->ids_row + c];
    return id >= (float)p->experts ? p->experts - 1 : id > 0 ? (int64_t)id : 0;
}

/* Sort the choices by expert, those of one by row. */
static void order(const Experts *p, const Parts *s) {
    int64_t next[p->experts];
    memset(s->starts, 0, sizeof(int32_t) * (p->experts + 1));
    for (int64_t t = 0; t < p->rows; t++)
        for (int64_t c = 0; c < p->chosen; c++) s->starts[choice(p, t, c) + 1]++;
    for (int64_t e = 0; e < p->experts; e++) {
        next[e] = s->starts[e];
        s->starts[e + 1] += s->starts[e];
    }
    for (int64_t t = 0; t < p->rows; t++)
        for (int64_t c = 0; c < p->chosen; c++) {
            int64_t place = next[choice(p, t, c)]++;
            s->places[t * p->chosen + c] = (int32_t)place;
            s->tokens[place] = (int32_t)t;
        }
    s->ups[0] = s->downs[0] = 0;
    for (int64_t e = 0; e < p->experts; e++) {
        int64_t ups = 0, downs = 0;
        if (s->starts[e + 1] > s->starts[e]) {
            Product up = up_of(p, s, e), down = down_of(p, s, e);
            ups = slipstream_product_stage(&up, 0).items;
            downs = slipstream_product_stage(&down, 0).items;
        }
        s->ups[e + 1] = s->ups[e] + (int32_t)ups;
        s->downs[e + 1] = s->downs[e] + (int32_t)downs;
    }
}

/* The expert of an item. */
static int64_t expert_of(const int32_t *items, int64_t experts, int64_t item) {
    int64_t low = 0, high = experts; /* items[low] <= item < items[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (items[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void multiply(const Experts *p, const Parts *s, const int32_t *items,
                     Product (*of)(const Experts *, const Parts *, int64_t), int64_t first,
                     int64_t last) {
    while (first < last) {
        int64_t e = expert_of(items, p->experts, first);
        int64_t end = items[e + 1] < last ? items[e + 1] : last;
        Product product = of(p, s, e);
        slipstream_product_work(&product, first - items[e], end - items[e]);
        first = end;
    }
}

static float gated(const Experts *p, float gate, float up) {
    switch (p->activation) {
    case GELU: return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
    case TANH_GELU: {
        float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    default: { /* clamped: GPT-OSS's */
        float g = gate > p->limit ? p->limit : gate;
        float u = up > p->limit ? p->limit : up < -p->limit ? -p->limit : up;
        return (u + 1.0f) * (g * slipstream_sigmoid(p->alpha * g));
    }
    }
}

static void activate(const Experts *p, float *row) {
    if (!p->is_gated) {
        for (int64_t i = 0; i < p->inner; i++) row[i] = row[i] > 0 ? row[i] * row[i] : 0.0f;
        return;
    }
    if (p->activation == SILU) {
        slipstream_silu_mul_row(row, row + p->inner, row, p->inner);
        return;
    }
    for (int64_t i = 0; i < p->inner; i++) row[i] = gated(p, row[i], row[p->inner + i]);
}

static void combine(const Experts *p, const Parts *s, int64_t t) {
    float *y = p->y + t * p->y_row;
    for (int64_t c = 0; c < p->chosen; c++) {
        const float *z = s->outer + s->places[t * p->chosen + c] * p->n;
        float weight = p->weights[t * p->weights_row + c];
        for (int64_t i = 0; i < p->n; i++) y[i] = c ? y[i] + weight * z[i] : weight * z[i];
    }
}

enum { ORDER, GATHER, UP, ACTIVATE, DOWN, COMBINE };

/* The chunk of the product of an expert that has its share of the rows. */
static int64_t chunk_of(const Experts *p, const Parts *s,
                        Product (*of)(const Experts *, const Parts *, int64_t)) {
    int64_t rows = 0, expert = 0;
    for (int64_t e = 0; e < p->experts; e++)
        if (s->starts[e + 1] - s->starts[e] > rows)
            rows = s->starts[e + 1] - s->starts[e], expert = e;
    Product product = of(p, s, expert);
    return slipstream_product_stage(&product, 0).chunk;
}

/* part: of six; after: the stage behind it, by the caller's numbers, which are consecutive. */
Stage slipstream_experts_stage(const Experts *p, int64_t part, int64_t after) {
    Parts s = parts_of(p);
    switch (part) {
    case ORDER: return (Stage){1, 1, after, 0};
    case GATHER:
        return (Stage){p->rows == 1 ? 0 : p->rows * p->chosen, slipstream_row_chunk(p->k), after, 0};
    case UP: return (Stage){s.ups[p->experts], chunk_of(p, &s, up_of), after, 0};
    case ACTIVATE:
        return (Stage){p->rows * p->chosen, slipstream_row_chunk(up_width(p)), after, 0};
    case DOWN: return (Stage){s.downs[p->experts], chunk_of(p, &s, down_of), after, 0};
    default: return (Stage){p->rows, slipstream_row_chunk(p->chosen * p->n), after, 0};
    }
}

void slipstream_experts_work(const Experts *p, int64_t part, int64_t first, int64_t last) {
    Parts s = parts_of(p);
    switch (part) {
    case ORDER: order(p, &s); return;
    case GATHER:
        for (int64_t i = first; i < last; i++)
            memcpy(s.outer + i * p->k, p->x + s.tokens[i] * p->x_row, sizeof(float) * p->k);
        return;
    case UP: multiply(p, &s, s.ups, up_of, first, last); return;
    case ACTIVATE:
        for (int64_t i = first; i < last; i++) activate(p, s.both + i * up_width(p));
        return;
    case DOWN: multiply(p, &s, s.downs, down_of, first, last); return;
    default:
        for (int64_t t = first; t < last; t++) combine(p, &s, t);
    }
}

static Stage experts_stage(const void *of, int64_t index) {
    return index < EXPERT_STAGES ? slipstream_experts_stage(of, index, index + 1) : NO_STAGE;
}

static void experts_work(const void *of, int64_t index, int64_t first, int64_t last) {
    slipstream_experts_work(of, index, first, last);
}

void slipstream_experts(const Experts *p) {
    slipstream_do(&(Job){experts_stage, experts_work, p});
}
