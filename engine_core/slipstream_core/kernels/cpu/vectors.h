/* Vectors of W floats, the width of the processor's, by GCC's and Clang's vector extensions. */

#ifndef SLIPSTREAM_VECTORS_H
#define SLIPSTREAM_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif

typedef float vec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#endif
