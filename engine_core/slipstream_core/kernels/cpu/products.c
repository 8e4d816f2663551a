/* Float32 products of rows with a packed matrix: y = (x W^T + bias) + more.
 *
 * A matrix [n, k] is packed once, as panels of PANEL outputs: [ceil(n / PANEL)][k][PANEL], padded
 * with zeros. A product therefore reads it sequentially, and a tile of ROWS x PANEL sums stays in
 * registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008,
 * without packing x, which is small here). The same layout serves one row, which is bound by
 * memory, and many rows, which are bound by arithmetic.
 *
 * - Each output is a single sum in the order of k, independent of other rows and of the number of
 *   threads: a row's result does not depend on its batch.
 * - A matrix of another format than float32 (coded.h) is decoded in registers for a few rows, and to
 *   L1 for more, in front of the same sums: results are those of the decoded matrix, to the bit.
 */

#include "coded.h"

#include "kernels.h"

#if W == 16
#define ROWS 12 /* 24 of 32 registers hold sums */
#elif W == 8
#define ROWS 6 /* 12 of 16 */
#else
#define ROWS 4
#endif
#define DEPTH 256     /* inputs per pass: this part of a panel stays in L1 */
#define BLOCK 96      /* rows of x per pass over a panel: they stay in L2 */
#define FEW 4         /* up to this many rows, each panel is read once, from memory */
#define AHEAD 2048    /* prefetch distance in floats, for panels that are read once */
#define CHUNK_NS 6000 /* approximate duration of a chunk of panels */
#define PER_NS 40     /* multiplications per ns, if bound by arithmetic */
#define BYTES_PER_NS 15 /* bytes read per ns, if bound by memory */

int64_t slipstream_panel(void) { return PANEL; }

typedef struct {
    const float *weight;
    int64_t row, column, n, k;
    float *packed;
} Pack;

static Stage pack_stage(const void *of, int64_t index) {
    const Pack *p = of;
    int64_t panels = (p->n + PANEL - 1) / PANEL;
    return index ? NO_STAGE : (Stage){panels, slipstream_row_chunk(p->k * PANEL), 1};
}

static void pack_panels(const void *of, int64_t index, int64_t first, int64_t last) {
    const Pack *p = of;
    (void)index;
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t j = 0; j < p->k; j++)
            for (int64_t i = 0; i < PANEL; i++) {
                int64_t output = panel * PANEL + i;
                p->packed[(panel * p->k + j) * PANEL + i] =
                    output < p->n ? p->weight[output * p->row + j * p->column] : 0.0f;
            }
}

/* weight[i * row + j * column] belongs to output i and input j. */
void slipstream_pack(const float *weight, int64_t row, int64_t column, int64_t n, int64_t k,
                     float *packed) {
    slipstream_do(&(Job){pack_stage, pack_panels, &(Pack){weight, row, column, n, k, packed}});
}

/* sums[m][p] += x[m] times `depth` inputs of panel p, for M rows and P panels that are `apart`
 * floats apart. M and P are constants, so all sums are in registers. once: no other rows read these
 * panels, so they are prefetched, except for a single row, where the hardware is faster (1.3 ms
 * against 1.6). */
static inline __attribute__((always_inline)) void tile(const int M, const int P, const int once,
                                                       const float *x, int64_t x_row,
                                                       const float *w, int64_t apart,
                                                       int64_t depth, float *sums) {
    const int64_t row = P * PANEL;
    vec c[M][2 * P];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int p = 0; p < 2 * P; p++) c[m][p] = *(vec *)(sums + m * row + p * W);
    for (int64_t j = 0; j < depth; j++, w += PANEL)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            if (once && M > 1) __builtin_prefetch(w + p * apart + AHEAD, 0, 3);
            vec a = *(const vec *)(w + p * apart), b = *(const vec *)(w + p * apart + W);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                float each = x[m * x_row + j];
                c[m][2 * p] += each * a;
                c[m][2 * p + 1] += each * b;
            }
        }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int p = 0; p < 2 * P; p++) *(vec *)(sums + m * row + p * W) = c[m][p];
}

/* As `tile`, for one row and P panels of format f that are `size` bytes apart. `depth` is whole
 * subs. */
CODED void coded_tile(const int64_t f, const int P, const void *packed, const float *x,
                      const uint8_t *w, int64_t size, int64_t depth, float *sums) {
    const Table table = table_of(KIND(f), packed);
    const uint8_t *head = w;
    vec c[8]; /* of constant size, as these are: an array of another is in memory */
#pragma GCC unroll 8
    for (int p = 0; p < 2 * P; p++) c[p] = *(vec *)(sums + p * W);
    for (int64_t k = 0; k < depth; k += SUB, w += sub_bytes(f)) {
        if ((k & (BLOCK_OF(f) - 1)) == 0) head = w, w += head_bytes(f);
        const uint8_t *codes = w + factor_bytes(f);
        Shared s[8];
        for (int64_t o = 0; o < SUB; o += 8) {
            Octet words[8];
            if (o == 0 || (groups_of_sub(f) == 2 && o == 16))
#pragma GCC unroll 8
                for (int p = 0; p < 2 * P; p++)
                    s[p] = shared(f, head + p / 2 * size, w + p / 2 * size, o / 16, p % 2);
#pragma GCC unroll 8
            for (int p = 0; p < 2 * P; p++)
                words[p] = octet(KIND(f), codes + p / 2 * size, o, p % 2);
#pragma GCC unroll 8
            for (int64_t j = 0; j < 8; j++)
#pragma GCC unroll 8
                for (int p = 0; p < 2 * P; p++)
                    c[p] += x[k + o + j] * weights(f, codes + p / 2 * size, o + j, p % 2, s + p,
                                                   words + p, &table);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < 2 * P; p++) *(vec *)(sums + p * W) = c[p];
}

static void tile_of(int rows, const float *x, int64_t x_row, const float *w, int64_t depth,
                    float *sums) {
#define CASE(M) \
    case M: tile(M, 1, 0, x, x_row, w, 0, depth, sums); return;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
        CASE(5) CASE(6)
#endif
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* Initialise the sums of `count` panels, [rows, count * PANEL], with the bias. */
static void begin(const Product *p, int64_t panel, int64_t count, int64_t rows, float *sums) {
    int64_t output = panel * PANEL, row = count * PANEL;
    int64_t width = p->n - output < row ? p->n - output : row;
    memset(sums, 0, sizeof(float) * rows * row);
    for (int64_t m = 0; p->bias && m < rows; m++)
        memcpy(sums + m * row, p->bias + output, sizeof(float) * width);
}

/* Write the sums to y, from row `first` on, and add `more`. */
static void end(const Product *p, int64_t panel, int64_t count, int64_t first, int64_t rows,
                const float *sums) {
    int64_t output = panel * PANEL, row = count * PANEL;
    int64_t width = p->n - output < row ? p->n - output : row;
    for (int64_t m = 0; m < rows; m++, sums += row) {
        float *y = p->y + (first + m) * p->y_row + output;
        if (p->more) {
            const float *more = p->more + (first + m) * p->more_row + output;
            for (int64_t i = 0; i < width; i++) y[i] = more[i] + sums[i];
        } else
            memcpy(y, sums, sizeof(float) * width);
    }
}

/* many_rows for codes: each part of a panel is decoded, and the next is prefetched meanwhile. */
static void many_coded_rows(const Product *p, int64_t panel, int64_t first, int64_t rows) {
    float sums[BLOCK * PANEL] __attribute__((aligned(64)));
    float decoded[DEPTH * PANEL] __attribute__((aligned(64)));
    int64_t f = p->format, size = coded_bytes(f, p->k);
    const uint8_t *w = first_panel(f, p->packed) + panel * size;
    const uint8_t *behind = w + ((p->n + PANEL - 1) / PANEL - panel) * size;
    begin(p, panel, 1, rows, sums);
    for (int64_t j = 0; j < p->k; j += DEPTH) {
        int64_t depth = p->k - j < DEPTH ? p->k - j : DEPTH;
        int64_t part = coded_bytes(f, depth), share = (part * ROWS / rows + 63) / 64 * 64;
        const uint8_t *ahead = w + part;
        slipstream_decode(f, p->packed, w, depth, decoded);
        if (share > part) share = part;
        for (int64_t m = 0; m < rows; m += ROWS) {
            for (int64_t i = 0; i < share && ahead + i < behind; i += 64)
                __builtin_prefetch(ahead + i, 0, 2);
            ahead += share;
            int count = (int)(rows - m < ROWS ? rows - m : ROWS);
            tile_of(count, p->x + (first + m) * p->x_row + j, p->x_row, decoded, depth,
                    sums + m * PANEL);
        }
        w += part;
    }
    end(p, panel, 1, first, rows, sums);
}

/* Rows [first, first + rows), at most BLOCK of them, and one panel. */
static void many_rows(const Product *p, int64_t panel, int64_t first, int64_t rows) {
    if (p->format) {
        many_coded_rows(p, panel, first, rows);
        return;
    }
    float sums[BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t panels = (p->n + PANEL - 1) / PANEL;
    const float *packed = p->packed, *w = packed + panel * p->k * PANEL;
    const float *behind = packed + panels * p->k * PANEL;
    begin(p, panel, 1, rows, sums);
    for (int64_t j = 0; j < p->k; j += DEPTH) {
        int64_t depth = p->k - j < DEPTH ? p->k - j : DEPTH;
        const float *ahead = w + depth * PANEL; /* the next part, still in memory */
        int64_t part = depth * PANEL, share = (part * ROWS / rows + 15) / 16 * 16;
        if (share > part) share = part;
        for (int64_t m = 0; m < rows; m += ROWS) {
            for (int64_t i = 0; i < share && ahead + i < behind; i += 16)
                __builtin_prefetch(ahead + i, 0, 2);
            ahead += share;
            int count = (int)(rows - m < ROWS ? rows - m : ROWS);
            tile_of(count, p->x + (first + m) * p->x_row + j, p->x_row, w, depth,
                    sums + m * PANEL);
        }
        w += depth * PANEL;
    }
    end(p, panel, 1, first, rows, sums);
}

/* Panels of codes at once for one row: those of scales need registers for these. */
CODED int panels_at_once(const int64_t f) { return KIND(f) > CODE_F16 ? 2 : 4; }

CODED void coded_row_of(const int64_t f, const Product *p, const uint8_t *w, int64_t size,
                        float *sums) {
    coded_tile(f, panels_at_once(f), p->packed, p->x, w, size, p->k / SUB * SUB, sums);
}

/* One row and `panels_at_once`. */
static void coded_row(const Product *p, int64_t panel) {
    float sums[4 * PANEL] __attribute__((aligned(64)));
    float rest[DEPTH * PANEL] __attribute__((aligned(64)));
    const int64_t f = p->format, size = coded_bytes(f, p->k);
    const int64_t whole = p->k / SUB * SUB, start = whole / DEPTH * DEPTH; /* of a block */
    const int count = panels_at_once(f);
    const uint8_t *w = first_panel(f, p->packed) + panel * size;
    begin(p, panel, count, 1, sums);
#define USUAL(F) \
    if (f == (F)) \
        coded_row_of(F, p, w, size, sums); \
    else
    USUAL_FORMATS switch (KIND(f)) {
        /* the kind is a constant in each case, as it is looked at for each weight */
#define OF_KIND(K) \
    case K: coded_row_of((f & ~(int64_t)15) | K, p, w, size, sums); break;
        OF_KIND(CODE_F16) OF_KIND(CODE_I8) OF_KIND(CODE_E4M3) OF_KIND(CODE_E5M2) OF_KIND(CODE_U8)
        OF_KIND(CODE_I4) OF_KIND(CODE_I5) OF_KIND(CODE_I6) OF_KIND(CODE_TABLE)
    }
    for (int i = 0; i < count && whole < p->k; i++) {
        slipstream_decode(f, p->packed, w + i * size + coded_bytes(f, start), p->k - start, rest);
        tile(1, 1, 0, p->x + whole, 0, rest + (whole - start) * PANEL, 0, p->k - whole,
             sums + i * PANEL);
    }
    end(p, panel, count, 0, 1, sums);
}

/* Up to FEW rows, or none, and `count` panels, so many that enough independent sums are computed at once. */
static void few_rows(const Product *p, int64_t panel, int64_t count) {
    float sums[4 * FEW * PANEL] __attribute__((aligned(64)));
    if (!p->rows) return;
    if (p->format) {
        if (count > 1)
            coded_row(p, panel);
        else
            many_coded_rows(p, panel, 0, p->rows);
        return;
    }
    const float *w = (const float *)p->packed + panel * p->k * PANEL;
    int64_t apart = p->k * PANEL;
    begin(p, panel, count, p->rows, sums);
    switch (p->rows * 8 + count) {
#define FEW_CASE(M, P) \
    case M * 8 + P: tile(M, P, 1, p->x, p->x_row, w, apart, p->k, sums); break;
        FEW_CASE(1, 1) FEW_CASE(1, 4) FEW_CASE(2, 1) FEW_CASE(2, 2) FEW_CASE(3, 1)
        FEW_CASE(3, 2) FEW_CASE(4, 1)
    }
    end(p, panel, count, 0, p->rows, sums);
}

/* The division of a product into items. With few rows an item is `at_once` panels, and the
 * remaining panels are items of one; with many rows an item is one panel and a block of rows. */
typedef struct {
    int64_t panels, at_once, whole, each, items, chunk;
} Cut;

static Cut cut(const Product *p) {
    Cut c = {(p->n + PANEL - 1) / PANEL, 1, 0, p->rows, 0, 0};
    int64_t blocks = 1;
    if (p->rows <= FEW) {
        c.at_once = p->rows == 1 ? 4 : p->rows == 4 ? 1 : 2;
        if (p->format) c.at_once = p->rows == 1 ? panels_at_once(p->format) : 1;
        c.whole = c.panels / c.at_once;
        c.items = c.whole + c.panels % c.at_once;
    } else {
        blocks = (p->rows + BLOCK - 1) / BLOCK;
        c.each = (p->rows + blocks - 1) / blocks;
        c.items = blocks * c.panels;
    }
    int64_t sums = c.at_once * PANEL * p->k, computed = c.each * sums / PER_NS;
    int64_t bytes = p->format ? coded_bytes(p->format, p->k) : PANEL * p->k * (int64_t)sizeof(float);
    int64_t read = c.at_once * bytes / BYTES_PER_NS;
    c.chunk = CHUNK_NS / (1 + (computed > read ? computed : read)) + 1;
    return c;
}

Stage slipstream_product_stage(const Product *p, int64_t after) {
    Cut c = cut(p);
    return (Stage){c.items, c.chunk, after};
}

void slipstream_product_work(const Product *p, int64_t first, int64_t last) {
    Cut c = cut(p);
    for (int64_t item = first; item < last; item++)
        if (p->rows > FEW) {
            int64_t row = item / c.panels * c.each, left = p->rows - row;
            if (left > 0) many_rows(p, item % c.panels, row, left < c.each ? left : c.each);
        } else if (item < c.whole)
            few_rows(p, item * c.at_once, c.at_once);
        else
            few_rows(p, c.whole * c.at_once + item - c.whole, 1);
}

static Stage product_stage(const void *of, int64_t index) {
    return index ? NO_STAGE : slipstream_product_stage(of, 1);
}

static void product_work(const void *of, int64_t index, int64_t first, int64_t last) {
    (void)index;
    slipstream_product_work(of, first, last);
}

void slipstream_product(const Product *p) {
    slipstream_do(&(Job){product_stage, product_work, p});
}

static Stage products_stage(const void *of, int64_t index) {
    const Products *p = of;
    Stage each = slipstream_product_stage(&p->first, 1);
    return index ? NO_STAGE : (Stage){each.items * p->count, each.chunk, 1};
}

static void products_work(const void *of, int64_t index, int64_t first, int64_t last) {
    const Products *p = of;
    int64_t items = slipstream_product_stage(&p->first, 1).items;
    (void)index;
    for (int64_t item = first; item < last; item++) {
        Product each = p->first;
        int64_t which = item / items;
        each.x += which * p->x_apart, each.y += which * p->y_apart;
        each.packed = (const char *)each.packed + which * p->packed_bytes;
        slipstream_product_work(&each, item % items, item % items + 1);
    }
}

void slipstream_products(const Products *p) {
    slipstream_do(&(Job){products_stage, products_work, p});
}

/* For callers that hold a lock and must not wait for other threads. */
void slipstream_product_alone(const Product *p) {
    slipstream_do_alone(&(Job){product_stage, product_work, p});
}
