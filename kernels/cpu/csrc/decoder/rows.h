// What a decoder does with single rows between its matrix products: RMS norms (Zhang & Sennrich 2019) and rotary
// positions (Su et al. 2021, halves rotated against each other).
#pragma once

#include "linear.h"

INLINE float inverse_rms(const float *x, int64_t size, float eps) {
    vfloat squares = splat(0.0f);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)size + eps);
}

// x × weight / rms(x), to elements of a dtype.
INLINE void normalize(const int dtype, const float *x, const float *weight, int64_t size, float eps, void *out) {
    float factor = inverse_rms(x, size, eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) put_elements(dtype, out, i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) put_element(dtype, out, i, x[i] * factor * weight[i]);
}

INLINE void convert_row(const int dtype, const float *x, int64_t size, void *out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) put_elements(dtype, out, i, load(x + i));
    for (; i < size; i++) put_element(dtype, out, i, x[i]);
}

// In place; the first 2 * half channels of a head.
INLINE void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}
