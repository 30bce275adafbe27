// C (+)= A × B for a few rows of A, the only matrix product that attention needs: queries × keys and weights × values.
//
// B is [depth, ldb] of one of the formats below. The columns of C are lanes and the rows of B are steps of the sum, so
// that a column never sees another one's B: whatever stands in unused slots of a block stays in their own columns.
#pragma once

#include "simd.h"

enum {
    B_PACKED,  // floats in scratch, that is in cache already; all others lie in blocks
    B_FP32,
    B_FP16,
    B_BF16_PAIRS,  // [depth / 2, ldb, 2]: two steps of a column lie together, so that a shift and a mask widen them
    B_BF16_DOT,    // the same, and A is pairs of bf16 too, for the processor's dot product of pairs
    B_INT8_PAIRS,  // [depth / 2, ldb, 2] as well
    B_INT8_DOT,    // the same, and A is pairs of 16-bit integers with a scale a row: products and sums are integers
    B_E4M3,        // 2^-8 times the numbers, as halves have a smaller exponent for the same bits
    B_E5M2,
    NUM_B_FORMATS,
};

#if defined(__AVX512BF16__) && LANES == 16
#define HAS_BF16_DOT 1
INLINE vfloat dot_pairs(vfloat sum, uint32_t a, vuint b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#else
#ifndef HAS_BF16_DOT
#define HAS_BF16_DOT 0  // 1 runs the formats and the flow of the dot product on processors without one, for tests
#endif
INLINE vfloat dot_pairs(vfloat sum, uint32_t a, vuint b) {
    sum += bits_to_float(a << 16) * (vfloat)(b << 16);
    return sum + bits_to_float(a & 0xffff0000) * (vfloat)(b & 0xffff0000);
}
#endif

#define MAX_TILE_ROWS 6  // × 2 vectors are 12 accumulators, which fit 16 registers beside B and a factor of A

INLINE int is_dot(int format) { return format == B_BF16_DOT || format == B_INT8_DOT; }
INLINE int is_paired(int format) { return is_dot(format) || format == B_BF16_PAIRS || format == B_INT8_PAIRS; }
INLINE int steps_per_line(int format) { return is_paired(format) ? 2 : 1; }

// Bytes of one column of one step (of a pair of steps, where they lie in pairs).
INLINE int64_t column_bytes(int format) {
    if (format == B_E4M3 || format == B_E5M2) return 1;
    return format == B_FP16 || format == B_INT8_PAIRS || format == B_INT8_DOT ? 2 : 4;
}

// LANES columns of a step from `column` on. `line` is the step's, or its pair's, of which it is the second or not.
INLINE vfloat load_step(int format, const char *line, int is_second, int64_t column) {
    if (format == B_FP32 || format == B_PACKED) return load((const float *)line + column);
    if (format == B_FP16) return half_to_float((const uint16_t *)line + column);
    if (format == B_E4M3) return e4m3_to_float((const uint8_t *)line + column);
    if (format == B_E5M2) return e5m2_to_float((const uint8_t *)line + column);
    if (format == B_INT8_PAIRS) {
        vint pairs = (vint)widen_bytes((const int8_t *)line + 2 * column);
        return __builtin_convertvector((is_second ? pairs : pairs << 16) >> 16, vfloat);
    }
    vuint pairs = *(const vuint_any *)((const uint32_t *)line + column);
    return is_second ? (vfloat)(pairs & 0xffff0000) : (vfloat)(pairs << 16);
}

// Fetches a line into the cache. One a step: many at once would fill the queue of outstanding misses, and the processor
// would wait for memory instead of multiplying.
INLINE void prefetch_line(int format, int vectors, const char *line) {
    if (format == B_PACKED) return;
    for (int64_t i = 0; i < vectors * LANES * column_bytes(format); i += 64) __builtin_prefetch(line + i);
}

// Adds one step to the sums of a tile. Each factor of A is used up before the next is loaded: registers are few.
INLINE void add_step(const int format, const int rows, const int vectors, const float *a, int64_t lda, const char *line,
                     int is_second, vfloat sum[MAX_TILE_ROWS][2]) {
    vfloat step[2];
#pragma GCC unroll 2
    for (int n = 0; n < vectors; n++) step[n] = load_step(format, line, is_second, n * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        vfloat factor = splat(a[r * lda]);
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) sum[r][n] += factor * step[n];
    }
}

// Adds a pair of steps, of which the second counts only if `has_second`.
INLINE void add_pair(const int rows, const int vectors, const uint32_t *a, int64_t lda, const char *line, int has_second,
                     vfloat sum[MAX_TILE_ROWS][2]) {
    vuint step[2];
#pragma GCC unroll 2
    for (int n = 0; n < vectors; n++) {
        step[n] = *(const vuint_any *)((const uint32_t *)line + n * LANES) & (has_second ? 0xffffffff : 0xffff);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) sum[r][n] = dot_pairs(sum[r][n], a[r * lda], step[n]);
    }
}

// One tile of C: `rows` × (vectors * LANES). All of format, rows and vectors are constants where this is inlined.
INLINE void multiply_tile(const int format, const int rows, const int vectors, const void *a, int64_t lda, const void *b,
                          int64_t ldb, int64_t depth, int64_t ahead, float *c, int64_t ldc, int accumulate) {
    // Few rows need a second set of sums to hide the latency of a multiply-add.
    const int chains = rows * vectors <= 4 ? 2 : 1;
    vfloat sum[2][MAX_TILE_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            sum[0][r][n] = accumulate ? load(c + r * ldc + n * LANES) : splat(0.0f);
            sum[1][r][n] = splat(0.0f);
        }
    }
    const int64_t line_bytes = ldb * column_bytes(format), second = is_paired(format) ? 0 : line_bytes;
    const char *line = b;
    const float *factor = a;
    const uint32_t *pair = a;
    // An odd depth leaves half of a last pair, which is no step and may hold anything: it is not widened.
    for (int64_t k = depth; k > 1; k -= 2) {
        prefetch_line(format, vectors, line + ahead);
        if (!is_paired(format)) prefetch_line(format, vectors, line + line_bytes + ahead);
        if (format == B_BF16_DOT) {
            add_pair(rows, vectors, pair++, lda, line, 1, sum[0]);
        } else {
            add_step(format, rows, vectors, factor, lda, line, 0, sum[0]);
            add_step(format, rows, vectors, factor + 1, lda, line + second, 1, sum[chains - 1]);
            factor += 2;
        }
        line += second + line_bytes;
    }
    if (depth % 2) {
        if (format == B_BF16_DOT) add_pair(rows, vectors, pair, lda, line, 0, sum[0]);
        else add_step(format, rows, vectors, factor, lda, line, 0, sum[0]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            put(c + r * ldc + n * LANES, chains == 2 ? sum[0][r][n] + sum[1][r][n] : sum[0][r][n]);
        }
    }
}

// The same for B_INT8_DOT. Depths of 512 do not overflow: a step adds 32767 × 127 at the most.
INLINE void multiply_integers(const int rows, const int vectors, const int32_t *a, int64_t lda, const float *a_scales,
                              const char *b, int64_t ldb, int64_t depth, int64_t ahead, float *c, int64_t ldc,
                              int accumulate) {
    vint sum[MAX_TILE_ROWS][2] = {};
    for (int64_t k = depth; k > 0; k -= 2) {
        prefetch_line(B_INT8_DOT, vectors, b + ahead);
        vint step[2];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            step[n] = (vint)widen_bytes((const int8_t *)b + n * LANES * 2);
            if (k == 1) step[n] &= 0xffff;
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vint factor = a[r * lda] - (vint){};
#pragma GCC unroll 2
            for (int n = 0; n < vectors; n++) sum[r][n] += dot_shorts(factor, step[n]);
        }
        a++;
        b += ldb * 2;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            vfloat product = __builtin_convertvector(sum[r][n], vfloat) * a_scales[r];
            put(c + r * ldc + n * LANES, accumulate ? load(c + r * ldc + n * LANES) + product : product);
        }
    }
}

typedef void multiply_tile_fn(const void *a, int64_t lda, const float *a_scales, const void *b, int64_t ldb,
                              int64_t depth, int64_t ahead, float *c, int64_t ldc, int accumulate);

#define DEFINE_TILE(format, rows, vectors)                                                                          \
    static void multiply_##format##_##rows##_##vectors(const void *a, int64_t lda, const float *a_scales,           \
                                                       const void *b, int64_t ldb, int64_t depth, int64_t ahead,    \
                                                       float *c, int64_t ldc, int accumulate) {                     \
        if (format == B_INT8_DOT) {                                                                                 \
            multiply_integers(rows, vectors, a, lda, a_scales, b, ldb, depth, ahead, c, ldc, accumulate);           \
        } else {                                                                                                    \
            multiply_tile(format, rows, vectors, a, lda, b, ldb, depth, ahead, c, ldc, accumulate);                 \
        }                                                                                                           \
    }
#define DEFINE_TILES(format)                                                                                       \
    DEFINE_TILE(format, 1, 1) DEFINE_TILE(format, 2, 1) DEFINE_TILE(format, 3, 1)                                   \
    DEFINE_TILE(format, 4, 1) DEFINE_TILE(format, 5, 1) DEFINE_TILE(format, 6, 1)                                   \
    DEFINE_TILE(format, 1, 2) DEFINE_TILE(format, 2, 2) DEFINE_TILE(format, 3, 2)                                   \
    DEFINE_TILE(format, 4, 2) DEFINE_TILE(format, 5, 2) DEFINE_TILE(format, 6, 2)
#define LIST_TILES(format)                                                                                         \
    {                                                                                                              \
        {multiply_##format##_1_1, multiply_##format##_2_1, multiply_##format##_3_1, multiply_##format##_4_1,        \
         multiply_##format##_5_1, multiply_##format##_6_1},                                                        \
        {multiply_##format##_1_2, multiply_##format##_2_2, multiply_##format##_3_2, multiply_##format##_4_2,        \
         multiply_##format##_5_2, multiply_##format##_6_2},                                                        \
    }

DEFINE_TILES(B_PACKED)
DEFINE_TILES(B_FP32)
DEFINE_TILES(B_FP16)
DEFINE_TILES(B_BF16_PAIRS)
DEFINE_TILES(B_BF16_DOT)
DEFINE_TILES(B_INT8_PAIRS)
DEFINE_TILES(B_INT8_DOT)
DEFINE_TILES(B_E4M3)
DEFINE_TILES(B_E5M2)

static multiply_tile_fn *const multiply_tiles[NUM_B_FORMATS][2][MAX_TILE_ROWS] = {
    LIST_TILES(B_PACKED),
    LIST_TILES(B_FP32),
    LIST_TILES(B_FP16),
    LIST_TILES(B_BF16_PAIRS),
    LIST_TILES(B_BF16_DOT),
    LIST_TILES(B_INT8_PAIRS),
    LIST_TILES(B_INT8_DOT),
    LIST_TILES(B_E4M3),
    LIST_TILES(B_E5M2),
};

// C[rows, columns] (+)= A[rows, depth] × B[depth, columns]; columns are a multiple of LANES. lda counts floats, or pairs.
// `a_scales`, one a row of A, are for B_INT8_DOT alone. What is needed soon lies `ahead` bytes behind b.
static void multiply(int format, int64_t rows, int64_t columns, int64_t depth, const void *a, int64_t lda,
                     const float *a_scales, const void *b, int64_t ldb, int64_t ahead, float *c, int64_t ldc, int accumulate) {
    int64_t num_chunks = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        int64_t first = rows * chunk / num_chunks, count = rows * (chunk + 1) / num_chunks - first;
        const char *tile_a = (const char *)a + first * lda * 4;
        for (int64_t column = 0; column < columns;) {
            int vectors = columns - column >= 2 * LANES ? 2 : 1;
            multiply_tiles[format][vectors - 1][count - 1](tile_a, lda, a_scales + first,
                                                           (const char *)b + column * column_bytes(format), ldb, depth, ahead, c + first * ldc + column, ldc, accumulate);
            column += vectors * LANES;
        }
    }
}
