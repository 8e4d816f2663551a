/* Adapters: low-rank changes of a product, each row's its own.
 *
 * A row's numbers do not depend on the rows beside it, and are the same to the bit wherever it is
 * computed: in a list of operations, or with a step's chunks of prompts.
 */

#include "kernels.h"
#include "vectors.h"

#define AT_ONCE 4 /* of a rank: y is read once for all of them */
#define ROWS 4    /* with one adapter, computed side by side: its factors are read once for them */

static inline float total(vec lanes) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += lanes[i];
    return sum;
}

/* dots[r][j] = x[r] . a[j] for `rows` rows and `num` of the rank. */
static inline __attribute__((always_inline)) void dot(const int rows, const int num,
                                                      const float *const *x, const float *a,
                                                      int64_t k, float (*dots)[AT_ONCE]) {
    vec sums[ROWS][AT_ONCE] = {{{0}}};
    int64_t i = 0;
    for (; i + W <= k; i += W)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < num; j++)
                sums[r][j] += *(const vec *)(x[r] + i) * *(const vec *)(a + j * k + i);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < num; j++) dots[r][j] = total(sums[r][j]);
    for (; i < k; i++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < num; j++) dots[r][j] += x[r][i] * a[j * k + i];
}

/* y[r] += dots[r] b for `rows` rows, AT_ONCE of the rank. */
static inline __attribute__((always_inline)) void add(const int rows, float (*dots)[AT_ONCE],
                                                      const float *b, float *const *y, int64_t n) {
    const float *b1 = b + n, *b2 = b1 + n, *b3 = b2 + n;
    int64_t i = 0;
    for (; i + W <= n; i += W)
        for (int r = 0; r < rows; r++) {
            vec *to = (vec *)(y[r] + i);
            const float *d = dots[r];
            *to += d[0] * *(const vec *)(b + i) + d[1] * *(const vec *)(b1 + i) +
                   d[2] * *(const vec *)(b2 + i) + d[3] * *(const vec *)(b3 + i);
        }
    for (; i < n; i++)
        for (int r = 0; r < rows; r++) {
            const float *d = dots[r];
            y[r][i] += d[0] * b[i] + d[1] * b1[i] + d[2] * b2[i] + d[3] * b3[i];
        }
}

/* The same of one of the rank. */
static inline __attribute__((always_inline)) void add_one(const int rows, float (*dots)[AT_ONCE],
                                                          const float *b, float *const *y,
                                                          int64_t n) {
    for (int r = 0; r < rows; r++) {
        int64_t i = 0;
        for (; i + W <= n; i += W) *(vec *)(y[r] + i) += dots[r][0] * *(const vec *)(b + i);
        for (; i < n; i++) y[r][i] += dots[r][0] * b[i];
    }
}

/* `rows` is a constant where it is inlined: so much of them is in registers. */
static inline __attribute__((always_inline)) void adapt(const int rows, const Adapted *adapted,
                                                        const float *const *x, float *const *y,
                                                        int64_t k, int64_t n) {
    const float *a = adapted->a, *b = adapted->b;
    float dots[ROWS][AT_ONCE];
    int64_t done = 0;
    for (; done + AT_ONCE <= adapted->rank; done += AT_ONCE) {
        if (rows == 1) {
            dot(rows, AT_ONCE, x, a + done * k, k, dots);
        } else { /* as many sums as there are registers */
            float two[ROWS][AT_ONCE];
            for (int half = 0; half < AT_ONCE; half += 2) {
                dot(rows, 2, x, a + (done + half) * k, k, two);
                for (int r = 0; r < rows; r++)
                    dots[r][half] = two[r][0], dots[r][half + 1] = two[r][1];
            }
        }
        add(rows, dots, b + done * n, y, n);
    }
    for (; done < adapted->rank; done++) {
        dot(rows, 1, x, a + done * k, k, dots);
        add_one(rows, dots, b + done * n, y, n);
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
