"""Online softmax over tiles of the cache, for prefill and decode, which differ only in how they loop over the context.

Scores, maxima and sums are float32 and in base 2 (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao, "FlashAttention-2", 2023). Scales per token are not part of the matrix products: a key's scale multiplies its
column of scores, a value's scale its column of probabilities, so that the products use exact elements.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from pagedkv.kernels.triton.formats import STATIC_SCALES, TOKEN_SCALES, decode_elements
from pagedkv.kernels.triton.int4 import load_int4_keys, load_int4_values
from pagedkv.kernels.triton.launch import LOG2_E

NO_SCORE: Final = tl.constexpr(-1.0e38)
"""A row's maximum before its first score. It is finite, so that a row without tokens has no infinity minus infinity."""
_LOG2_E: Final = tl.constexpr(LOG2_E)


@triton.jit
def attend_range(
    acc,
    row_max,
    row_sum,
    q,
    q_positions,
    slopes,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    k_first_ptr,
    block_table_ptr,
    begin,
    end,
    first_valid,
    kv_head,
    score_scale,
    cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    V_HEAD_DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds a row's tokens [begin, end) to acc [M, V_HEAD_DIM_PAD], row_max [M] and row_sum [M], and returns these.

    With IS_MASKED nothing outside [max(begin, first_valid), end) is loaded: no block table entries, keys, values or
    scales, so that a NaN there can't cause 0 × NaN. Without IS_MASKED the range must be whole tiles of tokens that all
    query rows see.
    """
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        is_valid = (positions >= first_valid) & (positions < end)
        blocks = _load(block_table_ptr + positions // BLOCK_SIZE, is_valid, 0, IS_MASKED).to(tl.int64)
        rows = (blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE

        if FORMAT == "int4":
            k = load_int4_keys(
                k_cache_ptr,
                k_first_ptr,
                k_scale_ptr,
                k_zero_ptr,
                block_table_ptr,
                start,
                tl.maximum(first_valid, begin),
                end,
                kv_head,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM,
                HEAD_DIM_PAD,
                BLOCK_N,
                q.dtype,
            )
        else:
            k = _load_rows(k_cache_ptr, rows, is_valid, HEAD_DIM, HEAD_DIM_PAD, IS_MASKED)
            k = decode_elements(k, FORMAT, HAS_FP8, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if K_SCALES == TOKEN_SCALES:
            scores *= _load(k_scale_ptr + rows, is_valid, 0.0, IS_MASKED).to(tl.float32)[None, :]
        scores *= score_scale
        if HAS_SOFTCAP:
            scores = cap * tanh(scores)
        distances = positions[None, :] - q_positions[:, None]
        if HAS_ALIBI:
            scores += slopes[:, None] * distances.to(tl.float32)
        if IS_MASKED:
            is_visible = is_valid[None, :] & (distances <= 0)
            if HAS_WINDOW:
                is_visible &= distances > -window
            scores = tl.where(is_visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        probs = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(probs, axis=1)
        row_max = new_max

        if FORMAT == "int4":
            v = load_int4_values(
                v_cache_ptr, v_scale_ptr, v_zero_ptr, rows, is_valid, V_HEAD_DIM, V_HEAD_DIM_PAD, BLOCK_N, q.dtype
            )
        else:
            v = _load_rows(v_cache_ptr, rows, is_valid, V_HEAD_DIM, V_HEAD_DIM_PAD, IS_MASKED)
            v = decode_elements(v, FORMAT, HAS_FP8, q.dtype)
        acc = acc * decay[:, None]
        if V_SCALES == TOKEN_SCALES:
            # Apply the tile's largest scale after the product: a scale alone can be below the least float16. So the
            # product of the tile is summed separately, and added to the float32 accumulator once a tile.
            v_scales = _load(v_scale_ptr + rows, is_valid, 0.0, IS_MASKED).to(tl.float32)
            largest = tl.maximum(tl.max(v_scales, axis=0), 1e-37)
            probs *= (v_scales / largest)[None, :]
            acc += tl.dot(probs.to(q.dtype), v, input_precision="ieee") * largest
        else:
            acc += tl.dot(probs.to(q.dtype), v, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def initial_state(sinks_ptr, heads, is_head, M: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Returns acc, row_max, row_sum before any token. A sink counts as a score without a value.

    heads: [M], the query head of each row. Sinks are those of Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", 2023.
    """
    acc = tl.zeros([M, V_HEAD_DIM_PAD], dtype=tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        row_sum = tl.full([M], 1.0, dtype=tl.float32)
    else:
        row_max = tl.full([M], NO_SCORE, dtype=tl.float32)
        row_sum = tl.zeros([M], dtype=tl.float32)
    return acc, row_max, row_sum


@triton.jit
def load_slopes(slopes_ptr, heads, is_head, HAS_ALIBI: tl.constexpr):
    """ALiBi's slope of each row's head in units of base 2 (Press et al., "Train Short, Test Long", 2021)."""
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
    else:
        slopes = heads.to(tl.float32)
    return slopes


@triton.jit
def scaled_for_keys(score_scale, k_scale_ptr, kv_head, K_SCALES: tl.constexpr):
    """Returns the scale of scores, including a static scale of the keys."""
    if K_SCALES == STATIC_SCALES:
        score_scale *= tl.load(k_scale_ptr + kv_head)
    return score_scale


@triton.jit
def normalized(acc, row_sum, v_scale_ptr, kv_head, V_SCALES: tl.constexpr):
    """Returns the output of rows, zero for a row without tokens. Applies a static scale of the values."""
    acc /= tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if V_SCALES == STATIC_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head)
    return acc


@triton.jit
def tanh(x):
    """tanh to float32's relative precision. Uses Lambert's continued fraction where the exponential would cancel."""
    square = x * x
    fraction = x * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + square * 15.0))
    power = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    exponential = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.25, fraction, tl.where(x < 0.0, -exponential, exponential))


@triton.jit
def _load(pointers, is_valid, other, IS_MASKED: tl.constexpr):
    return tl.load(pointers, mask=is_valid, other=other) if IS_MASKED else tl.load(pointers)


@triton.jit
def _load_rows(cache_ptr, rows, is_valid, DIM: tl.constexpr, DIM_PAD: tl.constexpr, IS_MASKED: tl.constexpr):
    dims = tl.arange(0, DIM_PAD)
    pointers = cache_ptr + rows[:, None] * DIM + dims[None, :]
    if IS_MASKED and DIM == DIM_PAD:
        loaded = tl.load(pointers, mask=is_valid[:, None], other=0)
    elif IS_MASKED:
        loaded = tl.load(pointers, mask=is_valid[:, None] & (dims < DIM)[None, :], other=0)
    elif DIM == DIM_PAD:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=(dims < DIM)[None, :], other=0)
    return loaded
