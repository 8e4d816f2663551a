/* Panels of codes, which are decoded to the float32 that a checkpoint's own dequantisation gives.
 *
 * A panel has PANEL outputs. It is a sequence of blocks of `block` inputs, of which the last may be
 * shorter. A block is what its outputs share, the head, and then for each 32 inputs the factors of
 * their groups and their codes:
 *
 *   head     scale [groups][PANEL], offset or zero [groups][PANEL]; with factors: of the whole block
 *   factors  of scale [groups][PANEL] int8, of offset [groups][PANEL] int8: of these 32 inputs
 *   codes    8 and 16 bits: [32][PANEL]
 *            4 bits: [4][PANEL] words of the codes of 8 inputs, the first in the lowest bits
 *            5 and 6 bits: behind them [1 or 2][PANEL] words of the codes' high bits
 *
 * A format is a number, of the fields below. Behind it stand the 16 values of a table, at the
 * beginning of the packed matrix.
 */

#ifndef SLIPSTREAM_CODED_H
#define SLIPSTREAM_CODED_H

#include "vectors.h"

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define PANEL (2 * W)
#define SUB 32 /* inputs whose codes stand together */
#define TABLE_BYTES 64

typedef int32_t veci __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vecu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int8_t vecb __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t vecub __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint16_t vech __attribute__((vector_size(W * 2), aligned(2), may_alias));

enum { FLOAT32, CODE_BF16, CODE_F16, CODE_I8, CODE_E4M3, CODE_E5M2, CODE_U8, CODE_I4, CODE_I5,
       CODE_I6, CODE_TABLE };
enum { NO_NUMBER, AS_F16, AS_BF16, AS_F32, AS_E8M0 };
enum { NO_OFFSET, ZERO, ZEROS, OFFSETS };

/* Fields of a format. Blocks are of 32 to 256 inputs, a power of two.
 * group: inputs that share a scale: 16, or more, which is then a whole block or, with factors, 32. */
#define KIND(f) ((int)((f) & 15))
#define SCALE(f) ((int)((f) >> 4 & 15))
#define OFFSET(f) ((int)((f) >> 8 & 15))
#define HAS_FACTORS(f) ((int)((f) >> 12 & 1))
#define THE_ZERO(f) ((int)((f) >> 16 & 255))
#define BLOCK_OF(f) ((int64_t)((f) >> 24 & 0xfff))
#define GROUP_OF(f) ((int64_t)((f) >> 36 & 0xfff))

#define FORMAT(group, block, zero, factors, offset, scale, kind) \
    ((int64_t)(group) << 36 | (int64_t)(block) << 24 | (zero) << 16 | (factors) << 12 | (offset) << 8 | \
     (scale) << 4 | (kind))

/* Of bfloat16, Q8_0, Q4_0, Q4_K and Q6_K everything is a constant, by USUAL(format). */
#define USUAL_FORMATS \
    USUAL(FORMAT(32, 32, 0, 0, NO_OFFSET, NO_NUMBER, CODE_BF16)) \
    USUAL(FORMAT(32, 32, 0, 0, NO_OFFSET, AS_F16, CODE_I8)) \
    USUAL(FORMAT(32, 32, 8, 0, ZERO, AS_F16, CODE_I4)) \
    USUAL(FORMAT(32, 256, 0, 1, OFFSETS, AS_F16, CODE_I4)) \
    USUAL(FORMAT(16, 256, 32, 1, ZERO, AS_F16, CODE_I6))

#define CODED static inline __attribute__((always_inline))

CODED int64_t number_bytes(const int number) {
    return number == AS_F32 ? 4 : number == AS_E8M0 ? 1 : number == NO_NUMBER ? 0 : 2;
}

/* Groups of SUB inputs that are told apart. */
CODED int64_t groups_of_sub(const int64_t f) { return GROUP_OF(f) == 16 ? 2 : 1; }

/* Scales of a head. */
CODED int64_t head_groups(const int64_t f) { return HAS_FACTORS(f) ? 1 : groups_of_sub(f); }

CODED int64_t offset_bytes(const int64_t f) {
    return OFFSET(f) == ZEROS ? 1 : OFFSET(f) == OFFSETS ? number_bytes(SCALE(f)) : 0;
}

CODED int64_t head_bytes(const int64_t f) {
    return head_groups(f) * PANEL * (number_bytes(SCALE(f)) + offset_bytes(f));
}

CODED int64_t factor_bytes(const int64_t f) {
    return HAS_FACTORS(f) ? groups_of_sub(f) * PANEL * (OFFSET(f) == OFFSETS ? 2 : 1) : 0;
}

CODED int64_t code_bytes(const int kind) {
    switch (kind) {
    case FLOAT32: return SUB * PANEL * 4;
    case CODE_BF16:
    case CODE_F16: return SUB * PANEL * 2;
    case CODE_I4:
    case CODE_TABLE: return SUB * PANEL / 2;
    case CODE_I5: return SUB * PANEL / 2 + PANEL * 4;
    case CODE_I6: return SUB * PANEL / 2 + PANEL * 8;
    default: return SUB * PANEL;
    }
}

CODED int64_t sub_bytes(const int64_t f) { return factor_bytes(f) + code_bytes(KIND(f)); }

CODED int64_t block_bytes(const int64_t f) {
    return head_bytes(f) + BLOCK_OF(f) / SUB * sub_bytes(f);
}

/* Bytes of the first k inputs of a panel; with k a multiple of a block, where that block is. */
CODED int64_t coded_bytes(const int64_t f, const int64_t k) {
    int64_t rest = k % BLOCK_OF(f);
    return k / BLOCK_OF(f) * block_bytes(f) +
           (rest ? head_bytes(f) + (rest + SUB - 1) / SUB * sub_bytes(f) : 0);
}

/* The first panel of a packed matrix. */
CODED const uint8_t *first_panel(const int64_t f, const void *packed) {
    return (const uint8_t *)packed + (KIND(f) == CODE_TABLE ? TABLE_BYTES : 0);
}

CODED vec of_half(vech halves) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__) && W == 8
    return (vec)_mm256_cvtph_ps((__m128i)halves);
#else
    /* the exponent's bias is added by a product, which is right for subnormal numbers too */
    veci h = __builtin_convertvector(halves, veci);
    veci sign = (h & 0x8000) << 16, rest = h & 0x7fff;
    vec magnitude = (vec)(rest << 13) * 0x1p112f;
    veci special = rest >= 0x7c00; /* infinite, or no number */
    veci wide = (special & (rest << 13 | 0x7f800000)) | (~special & (veci)magnitude);
    return (vec)(wide | sign);
#endif
}

CODED vec of_halves(const void *at) { return of_half(*(const vech *)at); }

/* Bytes as numbers of 8 bits: halves of the same exponent and mantissa, so that no number here is
 * subnormal in float32, which some processors compute slowly. */
CODED vec of_float8s(const int is_e4m3, const void *at) {
#if defined(__AVX512F__)
    vech code = (vech)_mm256_cvtepu8_epi16(_mm_loadu_si128(at));
#elif defined(__AVX2__) && W == 8
    vech code = (vech)_mm_cvtepu8_epi16(_mm_loadl_epi64(at));
#else
    vech code = __builtin_convertvector(*(const vecub *)at, vech);
#endif
    if (!is_e4m3) return of_half(code << 8);
    return of_half((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
}

/* W integers are widened by hand: GCC's conversion of a vector goes through memory. */
CODED vec of_bfloat16s(const void *at) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16);
#elif defined(__AVX2__) && W == 8
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16);
#else
    return (vec)(__builtin_convertvector(*(const vech *)at, veci) << 16);
#endif
}

CODED veci of_int8s(const void *at) {
#if defined(__AVX512F__)
    return (veci)_mm512_cvtepi8_epi32(_mm_loadu_si128(at));
#elif defined(__AVX2__) && W == 8
    return (veci)_mm256_cvtepi8_epi32(_mm_loadl_epi64(at));
#else
    return __builtin_convertvector(*(const vecb *)at, veci);
#endif
}

CODED veci of_bytes(const void *at) {
#if defined(__AVX512F__)
    return (veci)_mm512_cvtepu8_epi32(_mm_loadu_si128(at));
#elif defined(__AVX2__) && W == 8
    return (veci)_mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
#else
    return __builtin_convertvector(*(const vecub *)at, veci);
#endif
}

CODED vec floats(veci x) { return __builtin_convertvector(x, vec); }

/* W scales or offsets. */
CODED vec numbers(const int number, const uint8_t *at, const int i) {
    switch (number) {
    case AS_F16: return of_halves(at + i * W * 2);
    case AS_BF16: return of_bfloat16s(at + i * W * 2);
    case AS_F32: return *(const vec *)(at + i * W * 4);
    case AS_E8M0: {
        veci wide = of_bytes(at + i * W) << 23;
        veci least = wide == 0;
        return (vec)((least & (1 << 22)) | wide);
    }
    default: return (vec){0};
    }
}

/* What a group of W outputs shares. */
typedef struct {
    vec scale, offset;
} Shared;

/* From a head, at `head`, and from the factors at `sub`, for group 0 or 1 of SUB inputs. i: the
 * first or the second half of the panel. */
CODED Shared shared(const int64_t f, const uint8_t *head, const uint8_t *sub, const int64_t group,
                    const int i) {
    Shared s = {{0}, {0}};
    if (KIND(f) <= CODE_F16) return s;
    const int64_t groups = head_groups(f), g = HAS_FACTORS(f) ? 0 : group;
    const uint8_t *behind = head + groups * PANEL * number_bytes(SCALE(f));
    s.scale = numbers(SCALE(f), head + g * PANEL * number_bytes(SCALE(f)), i);
    if (HAS_FACTORS(f)) s.scale *= floats(of_int8s(sub + group * PANEL + i * W));
    if (OFFSET(f) == ZERO) s.offset = -(float)THE_ZERO(f) * s.scale;
    if (OFFSET(f) == ZEROS) s.offset = -floats(of_int8s(behind + g * PANEL + i * W)) * s.scale;
    if (OFFSET(f) == OFFSETS) {
        s.offset = numbers(SCALE(f), behind + g * PANEL * number_bytes(SCALE(f)), i);
        if (HAS_FACTORS(f))
            s.offset *= floats(of_int8s(sub + (groups_of_sub(f) + group) * PANEL + i * W));
    }
    return s;
}

/* The words that hold the codes of 8 inputs, from j on, j of SUB; zero where codes stand alone. */
typedef struct {
    veci low, high;
} Octet;

CODED Octet octet(const int kind, const uint8_t *codes, const int64_t j, const int i) {
    Octet o = {{0}, {0}};
    if (kind < CODE_I4) return o;
    o.low = *(const veci *)(codes + j / 8 * PANEL * 4 + i * W * 4);
    if (kind == CODE_I5 || kind == CODE_I6)
        o.high = *(const veci *)(codes + (4 + (kind == CODE_I6 ? j / 16 : 0)) * PANEL * 4 +
                                 i * W * 4);
    return o;
}

/* Values by the lowest 4 bits of each code; others may be set. */
typedef struct {
    vec low, high; /* 8 values in each, or 16 in the first where W is 16 */
    const float *at;
} Table;

CODED Table table_of(const int kind, const void *packed) {
    Table t = {{0}, {0}, packed};
    if (kind != CODE_TABLE) return t;
#if W >= 8
    t.low = *(const vec *)t.at;
#endif
#if W == 8
    t.high = *(const vec *)(t.at + 8);
#endif
    return t;
}

CODED vec looked_up(const Table *t, veci code) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)code, (__m512)t->low);
#elif defined(__AVX2__) && W == 8
    __m256 low = _mm256_permutevar8x32_ps((__m256)t->low, (__m256i)code);
    __m256 high = _mm256_permutevar8x32_ps((__m256)t->high, (__m256i)code);
    return (vec)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32((__m256i)code, 28));
#else
    vec found;
    for (int i = 0; i < W; i++) found[i] = t->at[code[i] & 15];
    return found;
#endif
}

/* The weights of input j of SUB, for W outputs. */
CODED vec weights(const int64_t f, const uint8_t *codes, const int64_t j, const int i,
                  const Shared *s, const Octet *o, const Table *t) {
    const int kind = KIND(f), shift = (int)(j % 8 * 4);
    vec value;
    switch (kind) {
    case CODE_BF16: return of_bfloat16s(codes + (j * PANEL + i * W) * 2);
    case CODE_F16: return of_halves(codes + (j * PANEL + i * W) * 2);
    case CODE_I8: value = floats(of_int8s(codes + j * PANEL + i * W)); break;
    case CODE_U8: value = floats(of_bytes(codes + j * PANEL + i * W)); break;
    case CODE_E4M3:
    case CODE_E5M2: value = of_float8s(kind == CODE_E4M3, codes + j * PANEL + i * W); break;
    case CODE_TABLE: value = looked_up(t, (veci)((vecu)o->low >> shift)); break;
    default: {
        veci code = (veci)((vecu)o->low >> shift) & 15;
        if (kind == CODE_I5) {
            int up = (int)(j % SUB) - 4;
            code |= (up < 0 ? o->high << -up : (veci)((vecu)o->high >> up)) & 16;
        } else if (kind == CODE_I6) {
            int up = (int)(j % 16) * 2 - 4;
            code |= (up < 0 ? o->high << -up : (veci)((vecu)o->high >> up)) & 48;
        }
        value = floats(code);
    }
    }
    return s->scale * value + s->offset; /* without an offset it is zero */
}

/* From coded.c: `inputs` of a panel from a block on, [inputs rounded up to SUB][PANEL]. */
void slipstream_decode(int64_t format, const void *packed, const uint8_t *panel, int64_t inputs,
                       float *out);

#endif
