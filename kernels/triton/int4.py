"""Elements of 4 bits: converts them to numbers in the attention kernels, and numbers to elements when storing.

The format is that of `pagedkv.kernels.quantization`, the layout that of `layout.py`. Keys share scales along the
tokens of a block, so a tile of keys is taken apart by blocks, [blocks, tokens, channels], and a tile of values by
groups of channels, [tokens, groups, channels]: each scale is loaded, and its power of two computed, once.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from pagedkv.plugin.kv_dtypes import INT4, SCALE_CODES_PER_OCTAVE

GROUP_SIZE: Final = tl.constexpr(INT4.group_size)
"""Channels of values that share a scale."""
_CODES_PER_OCTAVE = tl.constexpr(float(SCALE_CODES_PER_OCTAVE))
_MAX_NUMBER = tl.constexpr(2.0**21)
_MAX_ZERO = tl.constexpr(112.0)
_SMALLEST_SCALE = tl.constexpr(1e-30)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds a float32 to a whole number: a float32 of this size has no fraction."""
_NUM_CANDIDATES = tl.constexpr(8)
"""Scale codes tried, from 4 above the one that fits the range down."""


@triton.jit
def load_int4_keys(
    cache_ptr,
    first_ptr,
    scale_ptr,
    zero_ptr,
    block_table_ptr,
    start,
    first_valid,
    end,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The keys of tokens [start, start + BLOCK_N) as [BLOCK_N, DIM_PAD]; loads nothing outside [first_valid, end)."""
    TOKENS: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    NUM_BLOCKS: tl.constexpr = BLOCK_N // TOKENS
    begins = start + tl.arange(0, NUM_BLOCKS) * TOKENS
    is_block = (begins + TOKENS > first_valid) & (begins < end)
    blocks = tl.load(block_table_ptr + begins // BLOCK_SIZE, mask=is_block, other=0).to(tl.int64)
    head_blocks = (blocks * NUM_KV_HEADS + kv_head)[:, None, None]
    positions = begins[:, None] + tl.arange(0, TOKENS)[None, :]
    is_token = ((positions >= first_valid) & (positions < end))[:, :, None]
    offsets = (positions % BLOCK_SIZE)[:, :, None]

    dims = tl.arange(0, DIM_PAD)[None, None, :]
    is_dim = dims < DIM
    codes = tl.load(scale_ptr + head_blocks * DIM + dims, mask=is_block[:, None, None] & is_dim, other=0)
    zeros = tl.load(zero_ptr + head_blocks * DIM + dims, mask=is_block[:, None, None] & is_dim, other=0)
    numbers = _load_nibbles(
        cache_ptr + (head_blocks * BLOCK_SIZE + offsets) * (DIM // 2), is_token, DIM // 2, DIM_PAD // 2
    )
    is_first = is_token & (offsets == 0)
    fours = tl.load(first_ptr + head_blocks * (DIM // 4) + dims // 4, mask=is_first & is_dim, other=0)
    quarters = ((fours >> (dims % 4 * 2).to(tl.uint8)) & 3).to(tl.float32)
    keys = (numbers + zeros.to(tl.float32) + quarters * 0.25) * _scales(codes.to(tl.float32))
    return tl.reshape(keys.to(DTYPE), (BLOCK_N, DIM_PAD))


@triton.jit
def load_int4_values(
    cache_ptr,
    scale_ptr,
    zero_ptr,
    rows,
    is_valid,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rotated values of rows: [BLOCK_N] as [BLOCK_N, DIM_PAD]; loads nothing where not `is_valid`."""
    WIDTH: tl.constexpr = GROUP_SIZE if GROUP_SIZE < DIM_PAD else DIM_PAD
    NUM_GROUPS: tl.constexpr = (DIM + GROUP_SIZE - 1) // GROUP_SIZE
    groups = tl.arange(0, DIM_PAD // WIDTH)[None, :, None]
    is_row = is_valid[:, None, None]
    rows = rows[:, None, None]
    codes = tl.load(scale_ptr + rows * NUM_GROUPS + groups, mask=is_row & (groups < NUM_GROUPS), other=0)
    zeros = tl.load(zero_ptr + rows * NUM_GROUPS + groups, mask=is_row & (groups < NUM_GROUPS), other=0)
    numbers = _load_nibbles(
        cache_ptr + rows * (DIM // 2) + groups * (WIDTH // 2), is_row, DIM // 2 - groups * (WIDTH // 2), WIDTH // 2
    )
    values = (numbers + zeros.to(tl.float32)) * _scales(codes.to(tl.float32))
    return tl.reshape(values.to(DTYPE), (BLOCK_N, DIM_PAD))


@triton.jit
def _load_nibbles(pointers, is_valid, num_bytes, BYTES: tl.constexpr):
    """Elements of 3 dims as float32, the last one twice BYTES wide; pointers and `is_valid` are one wide there."""
    places = tl.arange(0, BYTES)[None, None, :]
    packed = tl.load(pointers + places, mask=is_valid & (places < num_bytes), other=0)
    return tl.interleave((packed & 15).to(tl.float32), (packed >> 4).to(tl.float32))


@triton.jit
def _scales(codes):
    return tl.exp2(codes / _CODES_PER_OCTAVE)


@triton.jit
def rotated(x, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Rows of x: [ROWS, DIM_PAD] float32 times the orthonormal Hadamard matrix, in blocks of DIM's power of two."""
    SIZE: tl.constexpr = DIM & -DIM
    dims = tl.zeros([ROWS, 1], dtype=tl.int32) + tl.arange(0, DIM_PAD)[None, :]
    width = 1
    while width < SIZE:
        partner = tl.gather(x, dims ^ width, 1)
        x = tl.where((dims & width) == 0, x + partner, partner - x)
        width *= 2
    return x * (1.0 / tl.sqrt(SIZE * 1.0))


@triton.jit
def finite(x):
    """Converts to float32, clamped to the range of 4 bits; NaN becomes 0."""
    x = x.to(tl.float32)
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -_MAX_NUMBER), _MAX_NUMBER)


@triton.jit
def best_codes(x, is_known, least_codes, substeps, AXIS: tl.constexpr):
    """Returns the scale codes along AXIS, which is kept with size 1, as float32: the best of eight by squared error.

    Args:
        x: float32, finite.
        is_known: mask of the numbers that count.
        least_codes: smallest codes that count as fitting the range.
        substeps: number of parts of a step to which elements are rounded.
    """
    low, high = _range(x, is_known, AXIS)
    fitting = tl.maximum(tl.maximum((high - low) / 15.0, tl.maximum(tl.abs(low), tl.abs(high)) / _MAX_ZERO), 0.0)
    fitting = tl.maximum(tl.ceil(tl.log2(tl.maximum(fitting, _SMALLEST_SCALE)) * _CODES_PER_OCTAVE), least_codes)
    best_errors = tl.full(fitting.shape, float("inf"), dtype=tl.float32)
    best = tl.zeros(fitting.shape, dtype=tl.float32)
    for candidate in range(_NUM_CANDIDATES):
        codes = tl.minimum(tl.maximum(fitting + (4.0 - candidate), -128.0), 127.0)
        elements, zeros = round_to_int4(x, is_known, codes, substeps, AXIS)
        differences = tl.where(is_known, (elements + zeros) * _scales(codes) - x, 0.0)
        errors = tl.sum(differences * differences, axis=AXIS, keep_dims=True)
        is_better = errors < best_errors
        best_errors = tl.where(is_better, errors, best_errors)
        best = tl.where(is_better, codes, best)
    return best


@triton.jit
def round_to_int4(x, is_known, codes, substeps, AXIS: tl.constexpr):
    """Elements of 0 to 15 and parts of a step, and zero points, as float32, with the scales of `codes`."""
    scales = _scales(codes)
    zeros = tl.minimum(tl.maximum(_rounded(_range(x, is_known, AXIS)[0] / scales), -128.0), 127.0)
    elements = _rounded(x / scales * substeps) / substeps - zeros
    return tl.minimum(tl.maximum(elements, 0.0), 16.0 - 1.0 / substeps), zeros


@triton.jit
def _range(x, is_known, AXIS: tl.constexpr):
    low = tl.min(tl.where(is_known, x, _MAX_NUMBER), axis=AXIS, keep_dims=True)
    high = tl.max(tl.where(is_known, x, -_MAX_NUMBER), axis=AXIS, keep_dims=True)
    return low, high


@triton.jit
def _rounded(x):
    """Rounds to the nearest whole number, ties to even. Ties are frequent when a scale becomes twice as coarse."""
    return (x + _ROUNDER) - _ROUNDER
