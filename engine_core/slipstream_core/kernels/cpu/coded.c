/* Packs the codes of a matrix into panels (coded.h), and decodes them. */

#include "coded.h"

#include "kernels.h"

/* Decode the first `inputs` of a block and those behind it, rounded up to SUB: [inputs][PANEL]. */
CODED void decode_as(const int64_t f, const void *packed, const uint8_t *at, int64_t inputs,
                     float *out) {
    const Table table = table_of(KIND(f), packed);
    const uint8_t *head = at;
    for (int64_t k = 0; k < inputs; k += SUB) {
        if ((k & (BLOCK_OF(f) - 1)) == 0) head = at, at += head_bytes(f);
        const uint8_t *codes = at + factor_bytes(f);
        Shared s[2] = {shared(f, head, at, 0, 0), shared(f, head, at, 0, 1)};
        for (int64_t o = 0; o < SUB; o += 8) {
            Octet words[2] = {octet(KIND(f), codes, o, 0), octet(KIND(f), codes, o, 1)};
            if (groups_of_sub(f) == 2 && o == 16)
                s[0] = shared(f, head, at, 1, 0), s[1] = shared(f, head, at, 1, 1);
#pragma GCC unroll 8
            for (int64_t j = 0; j < 8; j++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++, out += W)
                    *(vec *)out = weights(f, codes, o + j, i, s + i, words + i, &table);
        }
        at += sub_bytes(f);
    }
}

void slipstream_decode(int64_t format, const void *packed, const uint8_t *panel, int64_t inputs,
                       float *out) {
    /* the kind of codes is a constant in each case, as it is looked at for each weight */
#define AS(K) \
    case K: decode_as((format & ~(int64_t)15) | K, packed, panel, inputs, out); return;
    switch (KIND(format)) {
        AS(CODE_BF16) AS(CODE_F16) AS(CODE_I8) AS(CODE_E4M3) AS(CODE_E5M2) AS(CODE_U8) AS(CODE_I4)
        AS(CODE_I5) AS(CODE_I6) AS(CODE_TABLE)
    }
}

/* Bytes of a packed matrix [n, k]. */
int64_t slipstream_coded_bytes(int64_t format, int64_t n, int64_t k) {
    int64_t table = KIND(format) == CODE_TABLE ? TABLE_BYTES : 0;
    return table + (n + PANEL - 1) / PANEL * coded_bytes(format, k);
}

typedef struct {
    const uint8_t *codes;                     /* [n, k], a byte each, or two of 16 bits */
    const uint8_t *scales, *offsets;          /* [n, scales] or NULL */
    const int8_t *factors, *offset_factors;   /* [n, groups] or NULL */
    const int8_t *zeros;                      /* [n, groups] or NULL */
    int64_t n, k, first;                      /* first: number of the first of these outputs */
    int64_t num_scales, num_groups;           /* of a row */
    int64_t of_scale, of_group;               /* inputs that share one */
    int64_t format;
    uint8_t *packed; /* of zeros */
} PackCodes;

static void pack_row(const PackCodes *p, int64_t row) {
    const int64_t f = p->format, k = p->k, groups = groups_of_sub(f);
    const int64_t size = number_bytes(SCALE(f)), apart = offset_bytes(f);
    const int64_t output = p->first + row, lane = output % PANEL, width = KIND(f) <= CODE_F16 ? 2 : 1;
    uint8_t *at = (uint8_t *)first_panel(f, p->packed) + output / PANEL * coded_bytes(f, k), *head = at;
    const uint8_t *codes = p->codes + row * k * width;
    for (int64_t j = 0; j < k; j += SUB) {
        if ((j & (BLOCK_OF(f) - 1)) == 0) {
            head = at, at += head_bytes(f);
            for (int64_t g = 0; g < head_groups(f) && size; g++) {
                int64_t input = j + g * 16 < k ? j + g * 16 : k - 1; /* of 16 where there are two */
                int64_t scale = row * p->num_scales + input / p->of_scale;
                uint8_t *behind = head + head_groups(f) * PANEL * size;
                memcpy(head + (g * PANEL + lane) * size, p->scales + scale * size, size);
                if (OFFSET(f) == OFFSETS)
                    memcpy(behind + (g * PANEL + lane) * size, p->offsets + scale * size, size);
                if (OFFSET(f) == ZEROS)
                    behind[(g * PANEL + lane) * apart] =
                        (uint8_t)p->zeros[row * p->num_groups + input / p->of_group];
            }
        }
        for (int64_t g = 0; g < groups && HAS_FACTORS(f); g++) {
            int64_t input = j + g * 16 < k ? j + g * 16 : k - 1;
            int64_t group = row * p->num_groups + input / p->of_group;
            at[g * PANEL + lane] = (uint8_t)p->factors[group];
            if (OFFSET(f) == OFFSETS)
                at[(groups + g) * PANEL + lane] = (uint8_t)p->offset_factors[group];
        }
        uint8_t *to = at + factor_bytes(f);
        int64_t left = k - j < SUB ? k - j : SUB;
        for (int64_t i = 0; i < left; i++) {
            const uint8_t *code = codes + (j + i) * width;
            if (KIND(f) < CODE_I4)
                memcpy(to + (i * PANEL + lane) * width, code, width);
            else {
                uint32_t *words = (uint32_t *)(void *)to;
                words[i / 8 * PANEL + lane] |= (uint32_t)(*code & 15) << i % 8 * 4;
                if (KIND(f) == CODE_I5)
                    words[4 * PANEL + lane] |= (uint32_t)(*code >> 4 & 1) << i;
                if (KIND(f) == CODE_I6)
                    words[(4 + i / 16) * PANEL + lane] |= (uint32_t)(*code >> 4 & 3) << i % 16 * 2;
            }
        }
        at += sub_bytes(f);
    }
}

static Stage pack_codes_stage(const void *of, int64_t index) {
    const PackCodes *p = of;
    return index ? NO_STAGE : (Stage){p->n, slipstream_row_chunk(p->k * 4), 1};
}

static void pack_codes_work(const void *of, int64_t index, int64_t first, int64_t last) {
    (void)index;
    for (int64_t row = first; row < last; row++) pack_row(of, row);
}

/* Each output has bytes and words of its own, so rows are packed at once. */
void slipstream_pack_codes(const PackCodes *p) {
    slipstream_do(&(Job){pack_codes_stage, pack_codes_work, p});
}

/* out [count, k]: rows `ids` of a packed matrix. */
void slipstream_coded_rows(int64_t format, const void *packed, int64_t k, const int64_t *ids,
                           int64_t count, float *out) {
    for (int64_t row = 0; row < count; row++) {
        const uint8_t *panel = first_panel(format, packed) + ids[row] / PANEL * coded_bytes(format, k);
        float part[256 * PANEL] __attribute__((aligned(64)));
        for (int64_t j = 0; j < k; j += 256) {
            int64_t inputs = k - j < 256 ? k - j : 256;
            slipstream_decode(format, packed, panel + coded_bytes(format, j), inputs, part);
            for (int64_t i = 0; i < inputs; i++)
                out[row * k + j + i] = part[i * PANEL + ids[row] % PANEL];
        }
    }
}
