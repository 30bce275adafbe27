// Matrix products of a decoder: rows of activations × packed weights, with what follows a product done in registers.
//
// Weights lie in panels of PANEL columns: [columns / PANEL, depth, PANEL] floats, or [columns / PANEL, depth / 2, PANEL,
// 2] bf16, two steps of the sum beside each other for the processor's dot product of pairs. A row's sums run over the
// depth in one order, whatever rows stand beside it: an output never depends on the batch.
#pragma once

#include "../elements.h"

#if LANES == 16
#define PANEL_VECTORS 4  // × 6 rows are 24 of 32 registers
#else
#define PANEL_VECTORS 2  // × 6 rows are 12 of 16
#endif
#define PANEL (PANEL_VECTORS * LANES)
#define TILE_ROWS 6
#define LINES_A_STEP (PANEL >= 16 ? PANEL / 16 : 1)  // cache lines of 64 bytes that a step of a panel takes

enum { SILU, GELU_TANH, GELU };

typedef struct {
    const void *weight;
    const float *bias;  // [num_panels * PANEL], or null
    int64_t num_panels, depth;
} Linear;

// What is done with the sums of a tile.
enum {
    TO_FLOATS,  // out: floats
    TO_SUM,     // out: floats, to which they are added
    TO_GATED,   // out: elements, activation(first half of a panel) × second half
};

typedef struct {
    void *data;
    int64_t stride;  // elements from row to row
    int activation;
} Target;

INLINE int64_t bytes_of(int dtype) { return dtype == BF16 ? 2 : 4; }

INLINE void put_elements(const int dtype, void *p, int64_t i, vfloat x) {
    if (dtype == FP32) {
        put((float *)p + i, x);
        return;
    }
#if defined(__AVX512BF16__) && LANES == 16
    _mm256_storeu_si256((__m256i *)((uint16_t *)p + i), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vuint bits = (vuint)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vuint is_nan = (vuint)((bits & 0x7fffffff) > (vuint){} + 0x7f800000);
    *(vhalf_any *)((uint16_t *)p + i) = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vhalf);
#endif
}

// For the end of a row whose length is no multiple of LANES.
INLINE void put_element(const int dtype, void *p, int64_t i, float x) {
    if (dtype == FP32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = float_to_bf16(x);
}

// 1 / (1 + e^-x), by an exponential that never overflows.
INLINE vfloat sigmoid(vfloat x) {
    vint is_negative = x < splat(0.0f);
    vfloat e = exp2_nonpositive(choose(is_negative, x, -x) * 1.44269504f);
    return choose(is_negative, e, splat(1.0f)) / (1.0f + e);
}

INLINE vfloat activate(int activation, vfloat x) {
    if (activation == SILU) return x * sigmoid(x);
    // 0.5 (1 + tanh u) is sigmoid(2 u).
    if (activation == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    vfloat y;
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

// Sums of `rows` rows of a: [rows, depth] over a panel. Meanwhile a part of `ahead` is fetched, a line a step: the next
// panel, while this one's later tiles are bound by arithmetic.
INLINE void accumulate(const int dtype, const int rows, const char *a, int64_t a_stride_bytes, const char *panel,
                       int64_t depth, const char *ahead, vfloat sum[TILE_ROWS][PANEL_VECTORS]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < PANEL_VECTORS; n++) sum[r][n] = splat(0.0f);
    }
    const int64_t steps = dtype == BF16 ? depth / 2 : depth;
    for (int64_t k = 0; k < steps; k++) {
        vuint step[PANEL_VECTORS];
        __builtin_prefetch(ahead + k * 64, 0, 2);
#pragma GCC unroll 4
        for (int n = 0; n < PANEL_VECTORS; n++) step[n] = ((const vuint_any *)(panel + k * PANEL * 4))[n];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            uint32_t factor = *(const uint32_t *)(a + r * a_stride_bytes + k * 4);
#pragma GCC unroll 4
            for (int n = 0; n < PANEL_VECTORS; n++) {
                sum[r][n] = dtype == BF16 ? dot_pairs(sum[r][n], (vuint){} + factor, step[n])
                                          : sum[r][n] + bits_to_float(factor) * (vfloat)step[n];
            }
        }
    }
}

INLINE void finish_row(const int dtype, const int kind, const Target *target, int64_t row, int64_t panel,
                       const float *bias, vfloat sum[PANEL_VECTORS]) {
    const int64_t column = panel * PANEL;
    if (bias) {
#pragma GCC unroll 4
        for (int n = 0; n < PANEL_VECTORS; n++) sum[n] += load(bias + column + n * LANES);
    }
    if (kind == TO_GATED) {
        const int half = PANEL_VECTORS / 2;
#pragma GCC unroll 2
        for (int n = 0; n < half; n++) {
            put_elements(dtype, target->data, row * target->stride + column / 2 + n * LANES,
                         activate(target->activation, sum[n]) * sum[half + n]);
        }
        return;
    }
    float *out = (float *)target->data + row * target->stride + column;
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_VECTORS; n++) {
        put(out + n * LANES, kind == TO_SUM ? load(out + n * LANES) + sum[n] : sum[n]);
    }
}

INLINE void multiply_rows(const int dtype, const int kind, const int rows, const Linear *linear, int64_t panel,
                          const void *a, int64_t a_stride, const Target *target, int64_t first_row, const char *ahead) {
    vfloat sum[TILE_ROWS][PANEL_VECTORS];
    const int64_t row_bytes = a_stride * bytes_of(dtype);
    accumulate(dtype, rows, (const char *)a + first_row * row_bytes, row_bytes,
               (const char *)linear->weight + panel * PANEL * linear->depth * bytes_of(dtype), linear->depth, ahead, sum);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) finish_row(dtype, kind, target, first_row + r, panel, linear->bias, sum[r]);
}

typedef void multiply_rows_fn(const Linear *, int64_t, const void *, int64_t, const Target *, int64_t, const char *);

#define DEFINE_ROWS(dtype, kind, rows)                                                                             \
    static void multiply_##dtype##_##kind##_##rows(const Linear *linear, int64_t panel, const void *a,              \
                                                   int64_t a_stride, const Target *target, int64_t first_row,       \
                                                   const char *ahead) {                                             \
        multiply_rows(dtype, kind, rows, linear, panel, a, a_stride, target, first_row, ahead);                            \
    }
#define DEFINE_KIND(dtype, kind)                                                                                   \
    DEFINE_ROWS(dtype, kind, 1) DEFINE_ROWS(dtype, kind, 2) DEFINE_ROWS(dtype, kind, 3)                             \
    DEFINE_ROWS(dtype, kind, 4) DEFINE_ROWS(dtype, kind, 5) DEFINE_ROWS(dtype, kind, 6)
#define LIST_KIND(dtype, kind)                                                                                     \
    {                                                                                                              \
        multiply_##dtype##_##kind##_1, multiply_##dtype##_##kind##_2, multiply_##dtype##_##kind##_3,                \
        multiply_##dtype##_##kind##_4, multiply_##dtype##_##kind##_5, multiply_##dtype##_##kind##_6,                \
    }

DEFINE_KIND(FP32, TO_FLOATS)
DEFINE_KIND(FP32, TO_SUM)
DEFINE_KIND(FP32, TO_GATED)
DEFINE_KIND(BF16, TO_FLOATS)
DEFINE_KIND(BF16, TO_SUM)
DEFINE_KIND(BF16, TO_GATED)

static multiply_rows_fn *const multiply_rows_of[2][3][TILE_ROWS] = {
    {LIST_KIND(FP32, TO_FLOATS), LIST_KIND(FP32, TO_SUM), LIST_KIND(FP32, TO_GATED)},
    {LIST_KIND(BF16, TO_FLOATS), LIST_KIND(BF16, TO_SUM), LIST_KIND(BF16, TO_GATED)},
};

// Rows first to last of a: [*, depth] × one panel.
static void multiply_panel(int dtype, int kind, const Linear *linear, int64_t panel, const void *a, int64_t a_stride,
                           const Target *target, int64_t first, int64_t last) {
    const int64_t num_tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS, panel_bytes = PANEL * linear->depth * bytes_of(dtype);
    const char *next = (const char *)linear->weight + (panel + 1) * panel_bytes;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t start = first + (last - first) * tile / num_tiles, end = first + (last - first) * (tile + 1) / num_tiles;
        const char *ahead = next + tile % LINES_A_STEP * (panel_bytes / LINES_A_STEP);
        multiply_rows_of[dtype][kind][end - start - 1](linear, panel, a, a_stride, target, start, ahead);
    }
}
