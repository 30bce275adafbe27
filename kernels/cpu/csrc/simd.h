// Vectors of floats as wide as the target's registers, by the compiler's vector extensions: one source for every ISA.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && LANES == 4
#define HAS_NEON 1
#else
#define HAS_NEON 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));
typedef int16_t vshort_pairs __attribute__((vector_size(4 * LANES)));
typedef uint8_t vbyte __attribute__((vector_size(LANES)));
typedef int8_t vbyte_pairs __attribute__((vector_size(2 * LANES)));

// The same, at any address.
typedef vfloat vfloat_any __attribute__((aligned(4), may_alias));
typedef vuint vuint_any __attribute__((aligned(4), may_alias));
typedef vhalf vhalf_any __attribute__((aligned(2), may_alias));
typedef vbyte vbyte_any __attribute__((aligned(1), may_alias));
typedef vbyte_pairs vbyte_pairs_any __attribute__((aligned(1), may_alias));

// Subtracting zero changes no float, so that no instruction is left of it; adding it would turn -0 into 0.
INLINE vfloat splat(float x) { return x - (vfloat){}; }
INLINE vfloat load(const float *p) { return *(const vfloat_any *)p; }
INLINE void put(float *p, vfloat x) { *(vfloat_any *)p = x; }
INLINE vfloat choose(vint mask, vfloat yes, vfloat no) { return (vfloat)(((vint)yes & mask) | ((vint)no & ~mask)); }

#if defined(__AVX512F__) && LANES == 16
INLINE vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float max_lane(vfloat x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE float sum_lanes(vfloat x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE int32_t max_lane_of_ints(vint x) { return _mm512_reduce_max_epi32((__m512i)x); }
#elif defined(__AVX2__) && LANES == 8
INLINE vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }

INLINE float max_lane(vfloat x) {
    __m128 max = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    max = _mm_max_ps(max, _mm_movehl_ps(max, max));
    return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}

INLINE float sum_lanes(vfloat x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

INLINE int32_t max_lane_of_ints(vint x) {
    __m128i max = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    max = _mm_max_epi32(max, _mm_unpackhi_epi64(max, max));
    return _mm_cvtsi128_si32(_mm_max_epi32(max, _mm_shuffle_epi32(max, 1)));
}
#else
INLINE vfloat vmax(vfloat a, vfloat b) { return choose(a > b, a, b); }

INLINE float max_lane(vfloat x) {
    float max = x[0];
    for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
    return max;
}

INLINE float sum_lanes(vfloat x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE int32_t max_lane_of_ints(vint x) {
    int32_t max = x[0];
    for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
    return max;
}
#endif

// 2^x for x <= 0 (and NaN), within 2 units in the last place; 0 below -126, so that no denormals arise.
INLINE vfloat exp2_nonpositive(vfloat x) {
    const float round_to_int = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vint vanishes = x < splat(-126.0f);
    x = choose(vanishes, splat(-126.0f), x);
    vfloat shifted = x + round_to_int;
    vfloat f = x - (shifted - round_to_int);
    // Taylor's series of 2^f on [-0.5, 0.5]: the first term left out is below 2^-27.
    vfloat p = splat(1.5252734e-5f);
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    vfloat power = (vfloat)(((vint)shifted << 23) + 0x3f800000);
    return choose(vanishes, splat(0.0f), p * power);
}

// The same within 4e-6, which is far less than a bf16 holds.
INLINE vfloat exp2_coarse(vfloat x) {
#if defined(__AVX512DQ__) && LANES == 16
    // The fraction of -inf is 0, and scaling by it gives 0.
    vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, 0), n = x - f;
    vfloat p = splat(9.5700967e-3f);
    p = p * f + 5.5917860e-2f;
    p = p * f + 2.4024745e-1f;
    p = p * f + 6.9312181e-1f;
    p = p * f + 1.0f;
    return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return exp2_nonpositive(x);
#endif
}

// tanh by 2^-|x|: no cancellation matters here, since soft-capped scores are compared with one another.
INLINE vfloat vtanh(vfloat x) {
    vfloat size = choose(x < splat(0.0f), -x, x);
    vfloat e = exp2_nonpositive(size * -2.88539008f);
    vfloat t = (1.0f - e) / (1.0f + e);
    // Below 2^-6 the quotient loses digits that the series keeps.
    vfloat square = x * x;
    vfloat series = size * (1.0f - square * (0.33333333f - square * 0.13333333f));
    t = choose(size < splat(0.015625f), series, t);
    return choose(x < splat(0.0f), -t, t);
}

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
