/* Adapters: low-rank changes of a product, each row's its own.
 *
 * A row's numbers do not depend on the rows beside it, and are the same to the bit wherever it is
 * computed: in a list of operations, or with a step's chunks of prompts.
 */

#include "coded.h"
#include "kernels.h"

#define AT_ONCE 4 /* of a rank: y is read once for all of them */
#define ROWS 4    /* with one adapter, computed side by side: its factors are read once for them */

static inline float total(vec lanes) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += lanes[i];
    return sum;
}

CODED int64_t bytes_of(const int kind) { return kind == FLOAT32 ? 4 : 2; }

CODED vec floats_of(const int kind, const void *at) {
    return kind == FLOAT32     ? *(const vec *)at
           : kind == CODE_BF16 ? of_bfloat16s(at)
                               : of_halves(at);
}

/* The i-th of them: without reading behind the last. */
CODED float float_of(const int kind, const char *at, int64_t i) {
    if (kind == FLOAT32) return ((const float *)at)[i];
    vech one = {0};
    memcpy(&one, at + 2 * i, 2);
    return floats_of(kind, &one)[0];
}

/* One rounding wherever a processor has it: a compiler's choice would differ from kind to kind. */
CODED float product_and_sum(float x, float y, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(x, y, sum);
#else
    return x * y + sum;
#endif
}

/* dots[r][j] = x[r] . a[j] for `rows` rows and `num` of the rank. */
CODED void dot(const int kind, const int rows, const int num, const float *const *x, const char *a,
               int64_t k, float (*dots)[AT_ONCE]) {
    const int64_t size = bytes_of(kind);
    vec sums[ROWS][AT_ONCE] = {{{0}}};
    int64_t i = 0;
    for (; i + W <= k; i += W)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < num; j++)
                sums[r][j] += *(const vec *)(x[r] + i) * floats_of(kind, a + (j * k + i) * size);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < num; j++) dots[r][j] = total(sums[r][j]);
    for (; i < k; i++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < num; j++)
                dots[r][j] = product_and_sum(x[r][i], float_of(kind, a, j * k + i), dots[r][j]);
}

/* y[r] += dots[r] b for `rows` rows, AT_ONCE of the rank. */
CODED void add(const int kind, const int rows, float (*dots)[AT_ONCE], const char *b,
               float *const *y, int64_t n) {
    const int64_t size = bytes_of(kind);
    const char *b1 = b + n * size, *b2 = b1 + n * size, *b3 = b2 + n * size;
    int64_t i = 0;
    for (; i + W <= n; i += W)
        for (int r = 0; r < rows; r++) {
            vec *to = (vec *)(y[r] + i);
            const float *d = dots[r];
            *to += d[0] * floats_of(kind, b + i * size) + d[1] * floats_of(kind, b1 + i * size) +
                   d[2] * floats_of(kind, b2 + i * size) + d[3] * floats_of(kind, b3 + i * size);
        }
    for (; i < n; i++)
        for (int r = 0; r < rows; r++) {
            const float *d = dots[r];
            y[r][i] += d[0] * float_of(kind, b, i) + d[1] * float_of(kind, b1, i) +
                       d[2] * float_of(kind, b2, i) + d[3] * float_of(kind, b3, i);
        }
}

/* The same of one of the rank. */
CODED void add_one(const int kind, const int rows, float (*dots)[AT_ONCE], const char *b,
                   float *const *y, int64_t n) {
    for (int r = 0; r < rows; r++) {
        int64_t i = 0;
        for (; i + W <= n; i += W)
            *(vec *)(y[r] + i) += dots[r][0] * floats_of(kind, b + i * bytes_of(kind));
        for (; i < n; i++) y[r][i] += dots[r][0] * float_of(kind, b, i);
    }
}

/* Of a kind that is known when it runs, as a constant. */
#define OF_KIND(kind, call)                  \
    switch (kind) {                          \
    case FLOAT32: call(FLOAT32); break;      \
    case CODE_BF16: call(CODE_BF16); break;  \
    default: call(CODE_F16);                 \
    }

/* `rows` is a constant where it is inlined: so much of them is in registers. */
CODED void adapt(const int rows, const Adapted *adapted, const float *const *x, float *const *y,
                 int64_t k, int64_t n) {
    const int64_t a_row = k * bytes_of((int)adapted->a_kind);
    const int64_t b_row = n * bytes_of((int)adapted->b_kind);
    const char *a = adapted->a, *b = adapted->b;
    float dots[ROWS][AT_ONCE];
    int64_t done = 0;
    for (; done + AT_ONCE <= adapted->rank; done += AT_ONCE) {
        if (rows == 1) {
#define CALL(kind) dot(kind, rows, AT_ONCE, x, a + done * a_row, k, dots)
            OF_KIND(adapted->a_kind, CALL)
#undef CALL
        } else { /* as many sums as there are registers */
            float two[ROWS][AT_ONCE];
            for (int half = 0; half < AT_ONCE; half += 2) {
#define CALL(kind) dot(kind, rows, 2, x, a + (done + half) * a_row, k, two)
                OF_KIND(adapted->a_kind, CALL)
#undef CALL
                for (int r = 0; r < rows; r++)
                    dots[r][half] = two[r][0], dots[r][half + 1] = two[r][1];
            }
        }
#define CALL(kind) add(kind, rows, dots, b + done * b_row, y, n)
        OF_KIND(adapted->b_kind, CALL)
#undef CALL
    }
    for (; done < adapted->rank; done++) {
#define CALL(kind) dot(kind, rows, 1, x, a + done * a_row, k, dots)
        OF_KIND(adapted->a_kind, CALL)
#undef CALL
#define CALL(kind) add_one(kind, rows, dots, b + done * b_row, y, n)
        OF_KIND(adapted->b_kind, CALL)
#undef CALL
    }
}

/* Rows first to last, on the calling thread. */
void slipstream_adapt_rows(const Adapt *p, int64_t first, int64_t last) {
    while (first < last) {
        int32_t place = p->adapters[first];
        const Adapted *adapted = p->adapted + place * p->apart;
        const float *x[ROWS];
        float *y[ROWS];
        int rows = 0;
        for (; rows < ROWS && first + rows < last && p->adapters[first + rows] == place; rows++) {
            x[rows] = p->x + (first + rows) * p->x_row;
            y[rows] = p->y + (first + rows) * p->y_row;
        }
        if (place >= 0 && rows == ROWS)
            adapt(ROWS, adapted, x, y, p->k, p->n);
        else if (place >= 0)
            for (int r = 0; r < rows; r++) adapt(1, adapted, x + r, y + r, p->k, p->n);
        first += rows;
    }
}

/* The number of rows to claim at once, of `rows`. */
int64_t slipstream_adapt_chunk(int64_t rows) {
    int64_t chunk = rows / ROWS;
    return chunk < 1 ? 1 : chunk > ROWS ? ROWS : chunk;
}

static Stage adapt_stage(const void *of, int64_t index) {
    const Adapt *p = of;
    return index ? NO_STAGE : (Stage){p->rows, slipstream_adapt_chunk(p->rows), 1};
}

static void adapt_work(const void *of, int64_t index, int64_t first, int64_t last) {
    (void)index;
    slipstream_adapt_rows(of, first, last);
}

/* y += B (A x) for each row that has an adapter, with its own. */
void slipstream_adapt(const Adapt *p) { slipstream_do(&(Job){adapt_stage, adapt_work, p}); }
