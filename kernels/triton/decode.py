"""Attention of rows with one query token, each context split over programs (Dao et al., "Flash-Decoding", 2023).

A work item is a chunk of one sequence's context, for the query heads that share a tile. Its size depends on all context
lengths of the batch, which every program reads itself. So the host does not need to know them, and the grid is large
enough for any lengths: a captured graph can be replayed with other lengths.

    context lengths 70000, 900, 300, 0       items of 4000:   18 + 1 + 1 + 0

A few long sequences give enough items to fill the chip. A large batch of short ones gives one item a sequence, which
writes the output itself. Only sequences of several items write partial results for the reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.launch import Launch
from pagedkv.kernels.triton.layout import CacheArguments
from pagedkv.kernels.triton.options import head_constants, option_arguments
from pagedkv.kernels.triton.softmax import (
    NO_SCORE,
    attend_range,
    initial_state,
    load_slopes,
    normalized,
    scaled_for_keys,
)
from pagedkv.kernels.triton.tuning import Architecture, decode_tiles, split_limits
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions

_ROWS = tl.constexpr(128)
"""Context lengths that a program reads at once."""
_PARTIALS = tl.constexpr(16)
"""Partial results that the reduction reads at once."""


def plan_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: CacheArguments,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    architecture: Architecture,
) -> tuple[Launch, Launch]:
    """The launches, in order, that fill out: [num_tokens, num_heads, v_head_dim] for the leading `num_decodes` rows.

    Allocates the partial results: float32 [num_items, num_heads, v_head_dim] and, for maximum and sum,
    [num_items, num_heads, 2].
    """
    spec, num_rows, num_heads = cache.spec, metadata.num_decodes, q.shape[1]
    tiles = decode_tiles(architecture, q.dtype, cache.widest_dim, spec.kv_dtype.bits)
    heads = head_constants(num_heads, spec.num_kv_heads)
    num_head_tiles = spec.num_kv_heads * heads["HEAD_TILES"]
    limits = split_limits(architecture, num_head_tiles)
    num_items = limits.max_items + num_rows
    partial_out = torch.empty(num_items, num_heads, spec.v_head_dim, dtype=torch.float32, device=q.device)
    partial_stats = torch.empty(num_items, num_heads, 2, dtype=torch.float32, device=q.device)
    option_values = option_arguments(options)
    split = {
        "out_ptr": out,
        "partial_out_ptr": partial_out,
        "partial_stats_ptr": partial_stats,
        "v_scale_ptr": cache.pointers["v_scale_ptr"],
        "seq_lens_ptr": metadata.seq_lens,
        "window": option_values["window"],
        "num_rows": num_rows,
        "max_items": limits.max_items,
        "one_wave_items": limits.one_wave_items,
        "V_HEAD_DIM": spec.v_head_dim,
        "V_HEAD_DIM_PAD": cache.constants["V_HEAD_DIM_PAD"],
        "V_SCALES": cache.constants["V_SCALES"],
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": heads["GROUP"],
        "HAS_WINDOW": option_values["HAS_WINDOW"],
        "BLOCK_N": tiles.block_n,
        "MIN_CHUNK_TILES": tiles.min_chunk_tiles,
    }
    attend = Launch(
        _decode_kernel,
        (num_items, num_head_tiles),
        {
            **split,
            "q_ptr": q,
            **cache.pointers,
            "block_table_ptr": metadata.block_table,
            **option_values,
            "table_stride": metadata.block_table.stride(0),
            "q_stride_token": q.stride(0),
            "q_stride_head": q.stride(1),
            **cache.constants,
            **heads,
            "HAS_FP8": architecture.has_fp8_conversion,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return attend, Launch(_reduce_kernel, (num_rows, num_heads), split, num_warps=4)


@triton.jit(do_not_specialize=["window", "num_rows", "max_items", "one_wave_items", "table_stride"])
def _decode_kernel(
    out_ptr,
    partial_out_ptr,
    partial_stats_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    k_first_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    slopes_ptr,
    score_scale,
    cap,
    window,
    num_rows,
    max_items,
    one_wave_items,
    table_stride,
    q_stride_token,
    q_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    V_HEAD_DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK_TILES: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    item = tl.program_id(0)
    chunk_tiles = _chunk_tiles(
        seq_lens_ptr, num_rows, window, max_items, one_wave_items, HAS_WINDOW, BLOCK_N, MIN_CHUNK_TILES
    )
    row, first_item = _find_item(seq_lens_ptr, num_rows, window, item, chunk_tiles, HAS_WINDOW, BLOCK_N)
    if row >= num_rows:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    first_position, num_tiles = _context_tiles(seq_len, window, HAS_WINDOW, BLOCK_N)
    num_chunks = _num_chunks(num_tiles, chunk_tiles)
    chunk_len = (num_tiles + num_chunks - 1) // num_chunks * BLOCK_N
    begin = first_position + (item - first_item) * chunk_len
    end = tl.minimum(begin + chunk_len, seq_len)

    kv_head = tl.program_id(1) // HEAD_TILES
    group_heads = tl.program_id(1) % HEAD_TILES * TILE_HEADS + tl.arange(0, 16)
    heads = kv_head * GROUP + group_heads
    is_head = (tl.arange(0, 16) < TILE_HEADS) & (group_heads < GROUP)
    dims = tl.arange(0, HEAD_DIM_PAD)
    q = tl.load(
        q_ptr + row.to(tl.int64) * q_stride_token + heads[:, None] * q_stride_head + dims[None, :],
        mask=is_head[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    q_positions = tl.full([16], 0, dtype=tl.int32) + (seq_len - 1)
    first_valid = begin
    if HAS_WINDOW:
        first_valid = tl.maximum(begin, seq_len - window)

    slopes = load_slopes(slopes_ptr, heads, is_head, HAS_ALIBI)
    score_scale = scaled_for_keys(score_scale, k_scale_ptr, kv_head, K_SCALES)
    acc, row_max, row_sum = initial_state(sinks_ptr, heads, is_head, 16, V_HEAD_DIM_PAD, HAS_SINKS)
    if HAS_SINKS:
        # Count a sink once, in the first chunk.
        row_max = tl.where(item == first_item, row_max, NO_SCORE)
        row_sum = tl.where(item == first_item, row_sum, 0.0)
    acc, row_max, row_sum = attend_range(
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
        block_table_ptr + row.to(tl.int64) * table_stride,
        begin,
        end,
        first_valid,
        kv_head,
        score_scale,
        cap,
        window,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        V_HEAD_DIM,
        HEAD_DIM_PAD,
        V_HEAD_DIM_PAD,
        FORMAT,
        K_SCALES,
        V_SCALES,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_ALIBI,
        HAS_FP8,
        BLOCK_N,
        True,
    )

    v_dims = tl.arange(0, V_HEAD_DIM_PAD)
    mask = is_head[:, None] & (v_dims < V_HEAD_DIM)[None, :]
    if num_chunks == 1:
        out = normalized(acc, row_sum, v_scale_ptr, kv_head, V_SCALES).to(out_ptr.dtype.element_ty)
        out_rows = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(out_ptr + out_rows[:, None] * V_HEAD_DIM + v_dims[None, :], out, mask=mask)
    else:
        partial_rows = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial_out_ptr + partial_rows[:, None] * V_HEAD_DIM + v_dims[None, :], acc, mask=mask)
        tl.store(partial_stats_ptr + partial_rows * 2, row_max, mask=is_head)
        tl.store(partial_stats_ptr + partial_rows * 2 + 1, row_sum, mask=is_head)


@triton.jit(do_not_specialize=["window", "num_rows", "max_items", "one_wave_items"])
def _reduce_kernel(
    out_ptr,
    partial_out_ptr,
    partial_stats_ptr,
    v_scale_ptr,
    seq_lens_ptr,
    window,
    num_rows,
    max_items,
    one_wave_items,
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PAD: tl.constexpr,
    V_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK_TILES: tl.constexpr,
):
    """Joins the partial results of one sequence and head; writes zeros for a sequence without tokens."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    chunk_tiles = _chunk_tiles(
        seq_lens_ptr, num_rows, window, max_items, one_wave_items, HAS_WINDOW, BLOCK_N, MIN_CHUNK_TILES
    )
    num_tiles = _context_tiles(tl.load(seq_lens_ptr + row), window, HAS_WINDOW, BLOCK_N)[1]
    num_chunks = _num_chunks(num_tiles, chunk_tiles)
    if num_chunks == 1:
        return
    first_item = _first_item(seq_lens_ptr, row, window, chunk_tiles, HAS_WINDOW, BLOCK_N)

    dims = tl.arange(0, V_HEAD_DIM_PAD)
    acc = tl.zeros([V_HEAD_DIM_PAD], dtype=tl.float32)
    row_max = NO_SCORE
    row_sum = 0.0
    for start in range(0, num_chunks, _PARTIALS):
        chunks = start + tl.arange(0, _PARTIALS)
        is_chunk = chunks < num_chunks
        source = (first_item + chunks).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        maxima = tl.load(partial_stats_ptr + source * 2, mask=is_chunk, other=NO_SCORE)
        sums = tl.load(partial_stats_ptr + source * 2 + 1, mask=is_chunk, other=0.0)
        partials = tl.load(
            partial_out_ptr + source[:, None] * V_HEAD_DIM + dims[None, :],
            mask=is_chunk[:, None] & (dims < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
        weights = tl.exp2(maxima - new_max)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(sums * weights, axis=0)
        acc = acc * decay + tl.sum(partials * weights[:, None], axis=0)
        row_max = new_max

    out = normalized(acc[None, :], row_sum + tl.zeros([1], dtype=tl.float32), v_scale_ptr, head // GROUP, V_SCALES)
    target = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * V_HEAD_DIM
    tl.store(out_ptr + target + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=(dims < V_HEAD_DIM)[None, :])


@triton.jit
def _context_tiles(seq_lens, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the start of the first tile of a context, and its number of tiles."""
    first_positions = tl.maximum(seq_lens - window, 0) // BLOCK_N * BLOCK_N if HAS_WINDOW else seq_lens * 0
    return first_positions, (seq_lens - first_positions + BLOCK_N - 1) // BLOCK_N


@triton.jit
def _num_chunks(num_tiles, chunk_tiles):
    """Returns the number of chunks of at most `chunk_tiles` tiles, evenly divided, none empty."""
    at_least = tl.maximum((num_tiles + chunk_tiles - 1) // chunk_tiles, 1)
    even_tiles = tl.maximum((num_tiles + at_least - 1) // at_least, 1)
    return (num_tiles + even_tiles - 1) // even_tiles


@triton.jit
def _chunk_tiles(
    seq_lens_ptr,
    num_rows,
    window,
    max_items,
    one_wave_items,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK_TILES: tl.constexpr,
):
    """Returns the most tiles of an item: enough items to fill the chip once, but none too small for its start cost."""
    total = 0
    for first in range(0, num_rows, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
        total += tl.sum(_context_tiles(seq_lens, window, HAS_WINDOW, BLOCK_N)[1], axis=0)
    one_wave = tl.minimum((total + one_wave_items - 1) // one_wave_items, MIN_CHUNK_TILES)
    return tl.maximum(tl.maximum((total + max_items - 1) // max_items, one_wave), 1)


@triton.jit
def _find_item(seq_lens_ptr, num_rows, window, item, chunk_tiles, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the row of an item and that row's first item; row `num_rows` or more for an item without work."""
    row = 0
    first_item = 0
    num_items = 0
    for first in range(0, num_rows, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
        num_chunks = _num_chunks(_context_tiles(seq_lens, window, HAS_WINDOW, BLOCK_N)[1], chunk_tiles)
        is_before = num_items + tl.cumsum(num_chunks, axis=0) <= item
        row += tl.sum(is_before.to(tl.int32), axis=0)
        first_item += tl.sum(tl.where(is_before, num_chunks, 0), axis=0)
        num_items += tl.sum(num_chunks, axis=0)
    return row, first_item


@triton.jit
def _first_item(seq_lens_ptr, row, window, chunk_tiles, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Items of all rows before `row`."""
    first_item = 0
    for first in range(0, row, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < row, other=0)
        num_tiles = _context_tiles(seq_lens, window, HAS_WINDOW, BLOCK_N)[1]
        first_item += tl.sum(_num_chunks(num_tiles, chunk_tiles), axis=0)
    return first_item
