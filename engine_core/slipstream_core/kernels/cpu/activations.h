/* exp, sigmoid and silu: of one number, and of a vector of them with the same bits.
 *
 * Compilers keep a loop over the scalar ones scalar, as its comparisons may raise floating-point
 * exceptions. So loops take vectors, and the scalar ones what is left behind.
 */

#ifndef SLIPSTREAM_ACTIVATIONS_H
#define SLIPSTREAM_ACTIVATIONS_H

#include "vectors.h"

typedef int32_t ints __attribute__((vector_size(W * 4), aligned(4), may_alias));

/* exp as in Cephes' expf, about 2 ulp; arguments outside float's range are clamped, NaN is kept. */
static inline float slipstream_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float power_of_2 = x * 1.44269504f + (x < 0 ? -0.5f : 0.5f);
    int n = isnan(x) ? 0 : (int)power_of_2;
    float k = (float)n;
    float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float value; } power = {(uint32_t)(n + 127) << 23};
    return p * power.value;
}

static inline float slipstream_sigmoid(float x) { return 1.0f / (1.0f + slipstream_exp(-x)); }

static inline float slipstream_silu(float x) { return x / (1.0f + slipstream_exp(-x)); }

/* yes where `where` is set, else no. */
static inline vec slipstream_choose(ints where, vec yes, vec no) {
    return (vec)((where & (ints)yes) | (~where & (ints)no));
}

static inline vec slipstream_exps(vec x) {
    const vec all = (vec){0} + 1.0f;
    x = slipstream_choose(x < -87.0f, -87.0f * all, x);
    x = slipstream_choose(x > 88.0f, 88.0f * all, x);
    ints n = __builtin_convertvector(
        x * 1.44269504f + slipstream_choose(x < 0.0f, -0.5f * all, 0.5f * all), ints);
    vec k = __builtin_convertvector(n, vec);
    vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * all;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((n + 127) << 23);
}

static inline vec slipstream_sigmoids(vec x) { return 1.0f / (1.0f + slipstream_exps(-x)); }

static inline vec slipstream_silus(vec x) { return x / (1.0f + slipstream_exps(-x)); }

#endif
