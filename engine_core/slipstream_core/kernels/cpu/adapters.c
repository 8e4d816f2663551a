/* Adapters: low-rank changes of a product, each row's its own.
 *
 * A row's numbers do not depend on the rows beside it, and are the same to the bit wherever it is
 * computed: in a list of operations, or with a step's chunks of prompts.
 */

#include "kernels.h"
#include "vectors.h"

#define AT_ONCE 4 /* of a rank: x and y are read once for all of them */

static inline float total(vec lanes) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += lanes[i];
    return sum;
}

/* y += dots b for `num` rows of b, the first of which is at `b`. */
static void add(const float *dots, const float *b, int num, float *y, int64_t n) {
    int64_t i = 0;
    if (num == AT_ONCE) {
        const float *b1 = b + n, *b2 = b1 + n, *b3 = b2 + n;
        for (; i + W <= n; i += W)
            *(vec *)(y + i) += dots[0] * *(const vec *)(b + i) + dots[1] * *(const vec *)(b1 + i) +
                               dots[2] * *(const vec *)(b2 + i) + dots[3] * *(const vec *)(b3 + i);
        for (; i < n; i++) y[i] += dots[0] * b[i] + dots[1] * b1[i] + dots[2] * b2[i] + dots[3] * b3[i];
        return;
    }
    for (int j = 0; j < num; j++, b += n) {
        for (i = 0; i + W <= n; i += W) *(vec *)(y + i) += dots[j] * *(const vec *)(b + i);
        for (; i < n; i++) y[i] += dots[j] * b[i];
    }
}

/* One row, on the calling thread. */
void slipstream_adapt_row(const Adapted *adapted, const float *x, float *y, int64_t k, int64_t n) {
    for (int64_t first = 0; first < adapted->rank; first += AT_ONCE) {
        const float *a = adapted->a + first * k;
        int num = adapted->rank - first < AT_ONCE ? (int)(adapted->rank - first) : AT_ONCE;
        float dots[AT_ONCE];
        int64_t i = 0;
        if (num == AT_ONCE) {
            const float *a1 = a + k, *a2 = a1 + k, *a3 = a2 + k;
            vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (; i + W <= k; i += W) {
                vec of_x = *(const vec *)(x + i);
                s0 += of_x * *(const vec *)(a + i);
                s1 += of_x * *(const vec *)(a1 + i);
                s2 += of_x * *(const vec *)(a2 + i);
                s3 += of_x * *(const vec *)(a3 + i);
            }
            dots[0] = total(s0), dots[1] = total(s1), dots[2] = total(s2), dots[3] = total(s3);
            for (; i < k; i++) {
                dots[0] += x[i] * a[i], dots[1] += x[i] * a1[i];
                dots[2] += x[i] * a2[i], dots[3] += x[i] * a3[i];
            }
        } else {
            for (int j = 0; j < num; j++, a += k) {
                vec s = {0};
                for (i = 0; i + W <= k; i += W) s += *(const vec *)(x + i) * *(const vec *)(a + i);
                dots[j] = total(s);
                for (; i < k; i++) dots[j] += x[i] * a[i];
            }
        }
        add(dots, adapted->b + first * n, num, y, n);
    }
}

typedef struct {
    const float *x; /* [rows, k], rows x_row floats apart */
    int64_t x_row;
    float *y; /* [rows, n], rows y_row floats apart */
    int64_t y_row, rows, k, n;
    const int32_t *adapters; /* [rows], -1: none */
    const Adapted *adapted;  /* of the site, by adapter, `apart` apart */
    int64_t apart;
} Adapt;

static Stage adapt_stage(const void *of, int64_t index) {
    const Adapt *p = of;
    return index ? NO_STAGE : (Stage){p->rows, slipstream_row_chunk(ADAPT_COST * (p->k + p->n)), 1};
}

static void adapt_work(const void *of, int64_t index, int64_t first, int64_t last) {
    const Adapt *p = of;
    (void)index;
    for (int64_t row = first; row < last; row++)
        if (p->adapters[row] >= 0)
            slipstream_adapt_row(p->adapted + p->adapters[row] * p->apart, p->x + row * p->x_row,
                                 p->y + row * p->y_row, p->k, p->n);
}

/* y += B (A x) for each row that has an adapter, with its own. */
void slipstream_adapt(const Adapt *p) { slipstream_do(&(Job){adapt_stage, adapt_work, p}); }
