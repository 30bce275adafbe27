// How numbers become elements with a scale: as pagedkv.kernels.quantization has it, which explains the choices.
#pragma once

#include "simd.h"

typedef struct {
    float *data;  // of a block, head and token at the sum of their strides; null is 1 everywhere
    int64_t block_stride, head_stride, token_stride;  // a token stride of 0: the scale comes from outside the blocks
} Scales;

static const float SMALLEST_ABSMAX = 1e-30f;  // keeps the inverse of a scale finite

INLINE int is_scaled(int dtype) { return dtype == INT8; }
INLINE float max_element(int dtype) { return 127.0f; }

// The largest magnitude; as bits, so that a NaN is above all others.
INLINE float find_absmax(const float *x, int64_t dim) {
    vint max = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        vint bits = (vint)load(x + i) & 0x7fffffff, is_larger = bits > max;
        max = (bits & is_larger) | (max & ~is_larger);
    }
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = max[i] > largest ? max[i] : largest;
    return bits_to_float((uint32_t)largest);
}

// The nearest elements, halves to the even one. Beyond the range it saturates; NaN stays.
INLINE vfloat round_to_elements(const int dtype, vfloat x) {
    vfloat largest = splat(max_element(dtype));
    x = choose(x > largest, largest, x);
    x = choose(x < -largest, -largest, x);
    vfloat magic = splat(0x1.8p23f);  // floats of this size have the step of elements
    return (x + magic) - magic;
}

INLINE float fit_scale(const int dtype, const float *x, int64_t dim) {
    float absmax = find_absmax(x, dim);
    if (absmax < SMALLEST_ABSMAX) absmax = SMALLEST_ABSMAX;
    return absmax / max_element(dtype);
}

// The byte of an element that round_to_elements gave.
INLINE uint8_t element_byte(const int dtype, float element) { return element != element ? 0 : (uint8_t)(int8_t)element; }
