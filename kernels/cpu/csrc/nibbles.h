// int4: two elements in a byte, with scales and zero points of 8 bits, as pagedkv.kernels.quantization explains them.
//
// A number is (element + zero) × 2^(code / 8). Keys have a code and a zero a channel of a block, and their first token in
// a block has quarters of a step besides; values, which are rotated, have one of each for VALUE_GROUP channels of a token.
// The two elements of a byte are neighbours along the sum: keys of two channels, values of two tokens.
//
//     k [blocks, heads, head_dim / 2, block_size]     k_codes, k_zeros [blocks, heads, head_dim]
//     v [blocks, heads, block_size / 2, v_head_dim]   v_codes, v_zeros [blocks, heads, groups, block_size]
//     k_first [blocks, heads, head_dim / 4]: four times two bits
#pragma once

#include "elements.h"

enum { VALUE_GROUP = 64, MAX_BLOCK_SIZE = 512, CODES_PER_OCTAVE = 8 };

typedef struct {
    uint8_t *k_first;
    int8_t *k_codes, *k_zeros, *v_codes, *v_zeros;
} Nibbles;

// The parts of one head in one block.
typedef struct {
    uint8_t *k, *v, *k_first;
    int8_t *k_codes, *k_zeros, *v_codes, *v_zeros;
} NibbleBlock;

INLINE int64_t num_value_groups(int64_t v_dim) { return (v_dim + VALUE_GROUP - 1) / VALUE_GROUP; }

INLINE NibbleBlock nibble_block(const Nibbles *all, const void *k, const void *v, int64_t place, int64_t dim, int64_t v_dim,
                                int64_t size) {
    int64_t v_codes = num_value_groups(v_dim) * size;
    return (NibbleBlock){
        .k = (uint8_t *)k + place * dim * size / 2,
        .v = (uint8_t *)v + place * v_dim * size / 2,
        .k_first = all->k_first + place * dim / 4,
        .k_codes = all->k_codes + place * dim,
        .k_zeros = all->k_zeros + place * dim,
        .v_codes = all->v_codes + place * v_codes,
        .v_zeros = all->v_zeros + place * v_codes,
    };
}

static const float EIGHTHS[CODES_PER_OCTAVE] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f,
                                                1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};

INLINE float code_scale(int32_t code) {
    return bits_to_float((uint32_t)((code >> 3) + 127) << 23) * EIGHTHS[code & 7];
}

// The least code whose scale is not below x, which is not negative.
INLINE vint fitting_code(vfloat x) {
    vint bits = (vint)x, code = ((bits >> 23) - 127) * CODES_PER_OCTAVE;
    vfloat mantissa = (vfloat)((bits & 0x7fffff) | 0x3f800000);
    for (int i = 0; i < CODES_PER_OCTAVE; i++) code -= mantissa > splat(EIGHTHS[i]);  // true is -1
    return code;
}

INLINE vfloat code_scales(vint code) {
    vfloat power = (vfloat)(((code >> 3) + 127) << 23);
#if defined(__AVX512F__) && LANES == 16
    __m512 eighths = _mm512_castps256_ps512(_mm256_loadu_ps(EIGHTHS));  // of which the first half is used
    return power * (vfloat)_mm512_permutexvar_ps((__m512i)(code & 7), eighths);
#else
    vfloat eighth = splat(EIGHTHS[0]);
    for (int i = 1; i < CODES_PER_OCTAVE; i++) eighth = choose((code & 7) == i, splat(EIGHTHS[i]), eighth);
    return power * eighth;
#endif
}

// Codes and zeros as floats.
INLINE void widen_codes(const int8_t *codes, const int8_t *zeros, int64_t count, float *scales, float *offsets) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        put(scales + i, code_scales(widen_signed(codes + i)));
        put(offsets + i, __builtin_convertvector(widen_signed(zeros + i), vfloat));
    }
    for (; i < count; i++) {
        scales[i] = code_scale(codes[i]);
        offsets[i] = zeros[i];
    }
}

// Quarters of a block's first keys, as parts of a step; dim is a multiple of LANES.
INLINE void widen_quarters(const uint8_t *packed, int64_t dim, float *quarters) {
    vuint shifts;
    for (int i = 0; i < LANES; i++) shifts[i] = 2 * (uint32_t)i;
    for (int64_t i = 0; i < dim; i += LANES) {
        uint32_t word = 0;  // little endian, as all that the kernels are compiled for
        memcpy(&word, packed + i / 4, LANES / 4);
        vint two_bits = (vint)(((word - (vuint){}) >> shifts) & 3);
        put(quarters + i, __builtin_convertvector(two_bits, vfloat) * 0.25f);
    }
}

// ------------------------------------------------------------------------------------------------------------ rotation

// Multiplies a row by an orthonormal Hadamard matrix, which is its own inverse; where dim is no power of two, by blocks of
// the largest one that divides it.
static void rotate(float *x, int64_t dim) {
    int64_t size = dim & -dim;
    for (int64_t width = 1; width < size; width *= 2) {
        for (int64_t first = 0; first < dim; first += 2 * width) {
            for (int64_t i = first; i < first + width; i++) {
                float low = x[i], high = x[i + width];
                x[i] = low + high;
                x[i + width] = low - high;
            }
        }
    }
    float factor = 1.0f / sqrtf((float)size);
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

// -------------------------------------------------------------------------------------------------------- quantization

typedef struct {
    vfloat low, high;
    vint least_code;
} Range;

static const float MAX_NUMBER = 0x1p21f, MAX_ZERO = 112.0f;
enum { NO_CODE = -100000 };

INLINE vfloat clamp(vfloat x, float low, float high) {
    x = choose(x > splat(high), splat(high), x);
    return choose(x < splat(low), splat(low), x);
}

INLINE vfloat round_even(vfloat x) { return (x + 0x1.8p23f) - 0x1.8p23f; }  // below 2^22

// What can be stored of numbers: NaN becomes 0.
INLINE vfloat storable(vfloat x) { return clamp(choose(x == x, x, splat(0.0f)), -MAX_NUMBER, MAX_NUMBER); }

INLINE vint first_code(const Range *range) {
    vfloat size = vmax(choose(range->low < splat(0.0f), -range->low, range->low),
                       choose(range->high < splat(0.0f), -range->high, range->high));
    vfloat scale = vmax((range->high - range->low) / 15.0f, size / MAX_ZERO);
    vint code = fitting_code(scale), is_less = code < range->least_code;
    return (range->least_code & is_less) | (code & ~is_less);
}

INLINE vint clamp_code(vint code) {
    vint is_low = code < -128, is_high = code > 127;
    return (code & ~is_low & ~is_high) | (is_low & -128) | (is_high & 127);
}

INLINE vfloat fit_zero(vfloat low, vfloat scale) { return clamp(round_even(low / scale), -128.0f, 127.0f); }

// The element of x, in whole steps or `substeps` parts of one.
INLINE vfloat fit_element(vfloat x, vfloat scale, vfloat zero, float substeps) {
    // Far outside the range, where rounding is of no use, the bounds hold.
    vfloat steps = clamp(x / scale * substeps, -0x1p21f, 0x1p21f);
    return clamp(round_even(steps) / substeps - zero, 0.0f, 16.0f - 1.0f / substeps);
}

// The eight scales that are tried, coarsest first.
enum { COARSEST = 4, FINEST = -3 };

// Quantizes LANES channels of the first `count` tokens of a block, x: [count][stride]. Elements replace the numbers.
INLINE void quantize_key_channels(float *x, int64_t stride, int64_t count, vint least_code, vint *best_code, vfloat *best_zero) {
    Range range = {storable(load(x)), storable(load(x)), least_code};
    for (int64_t t = 0; t < count; t++) {
        vfloat number = storable(load(x + t * stride));
        put(x + t * stride, number);
        range.low = choose(number < range.low, number, range.low);
        range.high = choose(number > range.high, number, range.high);
    }
    vint first = first_code(&range);
    vfloat best_error = splat(INFINITY);
    *best_code = (vint){};
    for (int candidate = COARSEST; candidate >= FINEST; candidate--) {
        vint code = clamp_code(first + candidate);
        vfloat scale = code_scales(code), zero = fit_zero(range.low, scale), error = splat(0.0f);
        for (int64_t t = 0; t < count; t++) {
            vfloat number = load(x + t * stride);
            vfloat off = (fit_element(number, scale, zero, t ? 1.0f : 4.0f) + zero) * scale - number;
            error += off * off;
        }
        vint is_better = error < best_error;
        best_error = choose(is_better, error, best_error);
        *best_code = (code & is_better) | (*best_code & ~is_better);
    }
    vfloat scale = code_scales(*best_code), zero = fit_zero(range.low, scale);
    for (int64_t t = 0; t < count; t++) {
        put(x + t * stride, fit_element(load(x + t * stride), scale, zero, t ? 1.0f : 4.0f));
    }
    *best_zero = zero;
}

// Quantizes a group of one token's values, a multiple of LANES or 16 of them. Elements replace the numbers.
INLINE void quantize_value_group(float *x, int64_t count, int8_t *best_code, int8_t *best_zero) {
    Range range = {splat(INFINITY), splat(-INFINITY), (vint){} + NO_CODE};
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat number = storable(load(x + i));
        put(x + i, number);
        range.low = choose(number < range.low, number, range.low);
        range.high = choose(number > range.high, number, range.high);
    }
    range.low = splat(-max_lane(-range.low));
    range.high = splat(max_lane(range.high));
    vint first = first_code(&range), best = {};
    float best_error = INFINITY;
    for (int candidate = COARSEST; candidate >= FINEST; candidate--) {
        vint code = clamp_code(first + candidate);
        vfloat scale = code_scales(code), zero = fit_zero(range.low, scale), errors = splat(0.0f);
        for (int64_t i = 0; i < count; i += LANES) {
            vfloat off = (fit_element(load(x + i), scale, zero, 1.0f) + zero) * scale - load(x + i);
            errors += off * off;
        }
        float error = sum_lanes(errors);
        if (error < best_error) {
            best_error = error;
            best = code;
        }
    }
    vfloat scale = code_scales(best), zero = fit_zero(range.low, scale);
    for (int64_t i = 0; i < count; i += LANES) put(x + i, fit_element(load(x + i), scale, zero, 1.0f));
    *best_code = (int8_t)best[0];
    *best_zero = (int8_t)zero[0];
}
