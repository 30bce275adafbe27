// How numbers become elements with a scale: as pagedkv.kernels.quantization has it, which explains the choices.
#pragma once

#include "elements.h"

typedef struct {
    float *data;  // of a block, head and token at the sum of their strides; null is 1 everywhere
    int64_t block_stride, head_stride, token_stride;  // a token stride of 0: the scale comes from outside the blocks
} Scales;

static const float SMALLEST_ABSMAX = 1e-30f;  // keeps the inverse of a scale finite

INLINE int is_scaled(int dtype) { return dtype == INT8 || dtype == E4M3 || dtype == E5M2; }
INLINE float max_element(int dtype) { return dtype == INT8 ? 127.0f : dtype == E4M3 ? 448.0f : 57344.0f; }

// The largest magnitude; as bits, so that a NaN is above all others.
INLINE float find_absmax(const float *x, int64_t dim) {
    vint max = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        vint bits = (vint)load(x + i) & 0x7fffffff, is_larger = bits > max;
        max = (bits & is_larger) | (max & ~is_larger);
    }
    return bits_to_float((uint32_t)max_lane_of_ints(max));
}

// The nearest elements, halves to the even one. Beyond the range it saturates; NaN stays.
INLINE vfloat round_to_elements(const int dtype, vfloat x) {
    vfloat largest = splat(max_element(dtype));
    x = choose(x > largest, largest, x);
    x = choose(x < -largest, -largest, x);
    vfloat magic = splat(0x1.8p23f);  // floats of this size have the step of elements
    if (dtype != INT8) {
        vint exponent = (vint)x & 0x7f800000, least = (vint){} + (dtype == E4M3 ? 121 << 23 : 113 << 23);
        vint is_normal = exponent > least;
        magic = (vfloat)((exponent & is_normal) | (least & ~is_normal)) * (dtype == E4M3 ? 0x1.8p20f : 0x1.8p21f);
    }
    return (x + magic) - magic;
}

INLINE float squared_error(const int dtype, const float *x, int64_t dim, float scale) {
    vfloat sum = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        vfloat error = round_to_elements(dtype, load(x + i) / scale) * scale - load(x + i);
        sum += error * error;
    }
    return sum_lanes(sum);
}

// The largest magnitude becomes the largest element or, of floats, the one in the same octave with the least error.
INLINE float fit_scale(const int dtype, const float *x, int64_t dim) {
    float absmax = find_absmax(x, dim), largest = max_element(dtype);
    if (absmax < SMALLEST_ABSMAX) absmax = SMALLEST_ABSMAX;
    float scale = absmax / largest;
    if (dtype == INT8) return scale;
    float least_error = squared_error(dtype, x, dim, scale);
    float octave = dtype == E4M3 ? 256.0f : 32768.0f, step = octave / (dtype == E4M3 ? 8 : 4);
    for (float element = largest - step; element >= octave; element -= step) {
        float error = squared_error(dtype, x, dim, absmax / element);
        if (error < least_error) {
            least_error = error;
            scale = absmax / element;
        }
    }
    return scale;
}

// A row as 16-bit integers in pairs, for products with elements of 8 bits. Returns the scale.
INLINE float quantize_to_shorts(const float *x, int64_t dim, uint16_t *out) {
    float absmax = find_absmax(x, dim);
    if (absmax < SMALLEST_ABSMAX) absmax = SMALLEST_ABSMAX;
    float inverse = 32767.0f / absmax;
    for (int64_t i = 0; i < dim; i += LANES) {
        vuint rounded = (vuint)(load(x + i) * inverse + 0x1.8p23f);  // the integer is in the low bits
        *(vhalf_any *)(out + i) = __builtin_convertvector(rounded, vhalf);
    }
    return absmax / 32767.0f;
}

// The byte of an element that round_to_elements gave.
INLINE uint8_t element_byte(const int dtype, float element) {
    if (dtype == INT8) return element != element ? 0 : (uint8_t)(int8_t)element;
    if (dtype == E5M2) return (uint8_t)(float_to_half(element) >> 8);
    uint16_t half = float_to_half(element * 0x1p-8f);
    return (uint8_t)((half >> 8 & 0x80) | (element != element ? 0x7f : half >> 7 & 0x7f));
}
