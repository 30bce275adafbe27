// Elements of each dtype: to and from vectors of floats or integers, one by one, and dot products of pairs of them.
#pragma once

#include "simd.h"

// How elements are stored; the numbers are those of kernels/cpu/library.py.
enum { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, E4M3 = 4, E5M2 = 5, INT4 = 6 };

INLINE vfloat halves_to_floats(vhalf halves) {
#if defined(__AVX512F__) && LANES == 16
    return (vfloat)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__) && LANES == 8
    return (vfloat)_mm256_cvtph_ps((__m128i)halves);
#elif HAS_NEON
    return (vfloat)vcvt_f32_f16((float16x4_t)halves);
#else
    vuint bits = __builtin_convertvector(halves, vuint);
    // Exponent and mantissa moved into place make a float 2^112 too small; infinities and NaN get their exponent back.
    vuint magnitude = (bits & 0x7fff) << 13;
    vfloat value = (vfloat)magnitude * 0x1p112f;
    vint is_special = magnitude >= (vuint){} + (0x7c00u << 13);
    value = choose(is_special, (vfloat)(magnitude | 0x7f800000), value);
    return (vfloat)((vuint)value | ((bits & 0x8000) << 16));
#endif
}

INLINE vfloat half_to_float(const uint16_t *p) { return halves_to_floats(*(const vhalf_any *)p); }

// Bytes to the upper bytes of halves.
INLINE vhalf bytes_to_halves(const uint8_t *p) {
#if defined(__AVX2__) && LANES == 16
    return (vhalf)_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
#elif defined(__AVX2__) && LANES == 8
    return (vhalf)_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 8);
#else
    return __builtin_convertvector(*(const vbyte_any *)p, vhalf) << 8;
#endif
}

// 2^-8 times the numbers, which are halves then; NaN stays.
INLINE vfloat e4m3_to_float(const uint8_t *p) {
    vhalf bits = bytes_to_halves(p), magnitude = (bits & 0x7fff) >> 1;
    vhalf is_nan = (vhalf)(magnitude == 0x3f80);
    return halves_to_floats((bits & 0x8000) | magnitude | (is_nan & 0x7e00));
}

INLINE vfloat e5m2_to_float(const uint8_t *p) { return halves_to_floats(bytes_to_halves(p)); }

INLINE vint widen_signed(const int8_t *p) {
#if defined(__AVX512F__) && LANES == 16
    return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__) && LANES == 8
    return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif HAS_NEON
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vint)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes))));
#else
    vint wide;
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    return wide;
#endif
}

INLINE vuint widen_unsigned(const uint8_t *p) {
#if defined(__AVX512F__) && LANES == 16
    return (vuint)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__) && LANES == 8
    return (vuint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif HAS_NEON
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vuint)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
#else
    return __builtin_convertvector(*(const vbyte_any *)p, vuint);
#endif
}

// Pairs of bytes to pairs of 16-bit integers, each pair in a lane.
INLINE vuint widen_bytes(const int8_t *p) {
#if defined(__AVX512BW__) && LANES == 16
    return (vuint)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && LANES == 8
    return (vuint)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    return (vuint)__builtin_convertvector(*(const vbyte_pairs_any *)p, vshort_pairs);
#endif
}

// sum + a[0] * b[0] + a[1] * b[1] of pairs of 16-bit integers.
INLINE vint dot_shorts(vint sum, vint a, vint b) {
#if defined(__AVX512VNNI__) && LANES == 16
    return (vint)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && LANES == 16
    return sum + (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LANES == 8
    return sum + (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif HAS_NEON
    int16x8_t first = (int16x8_t)a, second = (int16x8_t)b;
    int32x4_t low = vmull_s16(vget_low_s16(first), vget_low_s16(second)), high = vmull_high_s16(first, second);
    return sum + (vint)vpaddq_s32(low, high);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {  // denormal: adding 0.5 leaves it, rounded, in the low bits
        return (uint16_t)(sign | (float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

INLINE float half_bits_to_float(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) return bits_to_float(sign | magnitude | 0x7f800000);
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

// Element i of an array of a dtype; 2^-8 times that of E4M3, as e4m3_to_float has it.
INLINE float get_element(int dtype, const void *p, int64_t i) {
    if (dtype == FP32) return ((const float *)p)[i];
    if (dtype == INT8) return ((const int8_t *)p)[i];
    if (dtype == E5M2) return half_bits_to_float((uint16_t)(((const uint8_t *)p)[i] << 8));
    if (dtype == E4M3) {
        uint16_t byte = ((const uint8_t *)p)[i], magnitude = byte & 0x7f;
        return half_bits_to_float((uint16_t)((byte & 0x80) << 8 | (magnitude == 0x7f ? 0x7e00 : magnitude << 7)));
    }
    uint16_t bits = ((const uint16_t *)p)[i];
    return dtype == BF16 ? bits_to_float((uint32_t)bits << 16) : half_bits_to_float(bits);
}

INLINE void set_element(int dtype, void *p, int64_t i, float x) {
    if (dtype == FP32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = dtype == BF16 ? float_to_bf16(x) : float_to_half(x);
}

INLINE int64_t element_bytes(int dtype) { return dtype == FP32 ? 4 : dtype == BF16 || dtype == FP16 ? 2 : 1; }

// Bytes of `count` elements, which are even.
INLINE int64_t elements_bytes(int dtype, int64_t count) { return dtype == INT4 ? count / 2 : count * element_bytes(dtype); }

// LANES numbers of a dtype that numbers outside the cache have: FP32, BF16 or FP16.
INLINE vfloat get_numbers(int dtype, const void *p, int64_t i) {
    if (dtype == FP32) return load((const float *)p + i);
    if (dtype == FP16) return half_to_float((const uint16_t *)p + i);
    return (vfloat)(__builtin_convertvector(*(const vhalf_any *)((const uint16_t *)p + i), vuint) << 16);
}

INLINE vhalf floats_to_bf16(vfloat x) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vhalf)_mm512_cvtneps_pbh((__m512)x);
#elif HAS_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vhalf)vcvt_bf16_f32((float32x4_t)x);
#else
    vuint bits = (vuint)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vuint is_nan = (vuint)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), vhalf);
#endif
}

// Pairs of bf16, each in a lane.
INLINE vuint pack_bf16(vfloat first, vfloat second) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && LANES == 16
    // Both in one vector, the second behind the first; then side by side.
    const vuint interleave = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                              0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vuint)_mm512_permutexvar_epi16((__m512i)interleave, both);
#else
    return __builtin_convertvector(floats_to_bf16(first), vuint) | __builtin_convertvector(floats_to_bf16(second), vuint) << 16;
#endif
}

INLINE vhalf floats_to_halves(vfloat x) {
#if defined(__AVX512F__) && LANES == 16
    return (vhalf)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif HAS_NEON
    return (vhalf)vcvt_f16_f32((float32x4_t)x);
#else
    vhalf halves;
    for (int i = 0; i < LANES; i++) halves[i] = float_to_half(x[i]);
    return halves;
#endif
}

INLINE void set_numbers(int dtype, void *p, int64_t i, vfloat x) {
    if (dtype == FP32) put((float *)p + i, x);
    else *(vhalf_any *)((uint16_t *)p + i) = dtype == BF16 ? floats_to_bf16(x) : floats_to_halves(x);
}

// sum + a[0] * b[0] + a[1] * b[1] of pairs of bf16.
#if defined(__AVX512BF16__) && LANES == 16
#define HAS_BF16_DOT 1
INLINE vfloat dot_pairs(vfloat sum, vuint a, vuint b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif HAS_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT 1
INLINE vfloat dot_pairs(vfloat sum, vuint a, vuint b) {
    return (vfloat)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#else
#ifndef HAS_BF16_DOT
#define HAS_BF16_DOT 0  // 1 runs the formats and the flow of the dot product on processors without one, for tests
#endif
INLINE vfloat dot_pairs(vfloat sum, vuint a, vuint b) {
    sum += (vfloat)(a << 16) * (vfloat)(b << 16);
    return sum + (vfloat)(a & 0xffff0000) * (vfloat)(b & 0xffff0000);
}
#endif
