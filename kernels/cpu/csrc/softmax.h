// Dot products to weights: an online softmax in base 2 (Milakov & Gimelshein 2018; Dao 2023, FlashAttention-2).
#pragma once

#include "plan.h"

static const float LOG2_E = 1.44269504f;
static const float LOWEST = -1e30f;  // below any score, and finite: differences of it with -inf are -inf, not NaN

// Where a row stands: its query's position, relative to the first of the scores, and the scores that it sees.
typedef struct {
    int64_t head, position, low, high;
} RowView;

// `position` is relative to the first of `count` scores.
INLINE RowView view_row(const AttendArgs *args, int64_t head, int64_t position, int64_t count) {
    return (RowView){
        .head = head,
        .position = position,
        .low = args->sliding_window ? max64(0, position + 1 - args->sliding_window) : 0,
        .high = min64(count, position + 1),
    };
}

// Turns a row's dot products with `count` tokens into scores in base 2, those not seen into -inf. Returns the largest.
INLINE float finish_scores(const AttendArgs *args, const RowView *view, const float *k_scales, int64_t count, float *scores) {
    float slope = args->alibi_slopes ? args->alibi_slopes[view->head] * LOG2_E : 0.0f;
    float scale = args->softcap ? args->scale / args->softcap : args->scale * LOG2_E;
    float cap = args->softcap * LOG2_E;
    vfloat lane, max = splat(LOWEST);
    for (int i = 0; i < LANES; i++) lane[i] = (float)i;
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat x = load(scores + i) * scale;
        if (k_scales) x *= load(k_scales + i);
        if (args->softcap) x = vtanh(x) * cap;
        if (args->alibi_slopes) x += slope * (lane + (float)(i - view->position));
        if (i < view->low || i + LANES > view->high) {
            vfloat column = lane + (float)i;
            vint is_seen = (column >= splat((float)view->low)) & (column < splat((float)view->high));
            x = choose(is_seen, x, splat(-INFINITY));
        }
        put(scores + i, x);
        max = vmax(x, max);
    }
    return max_lane(max);
}

INLINE float find_max(const float *scores, int64_t count) {
    vfloat max = splat(LOWEST);
    for (int64_t i = 0; i < count; i += LANES) max = vmax(load(scores + i), max);
    return max_lane(max);
}

// Scores × scale to weights 2^(score - max) × v_scale, in place. Returns the sum of the weights before their scales.
INLINE float make_weights(float *scores, int64_t count, float max, const float *v_scales) {
    vfloat total = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat weight = exp2_nonpositive(load(scores + i) - max);
        total += weight;
        put(scores + i, v_scales ? weight * load(v_scales + i) : weight);
    }
    return sum_lanes(total);
}

// The same as bf16, in `pairs`.
INLINE float make_bf16_weights(const float *scores, int64_t count, float scale, float max, const float *v_scales,
                               uint16_t *pairs) {
    vfloat total = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat weight = exp2_coarse(load(scores + i) * scale - max);
        total += weight;
        if (v_scales) weight *= load(v_scales + i);
        *(vhalf_any *)(pairs + i) = floats_to_bf16(weight);
    }
    return sum_lanes(total);
}
