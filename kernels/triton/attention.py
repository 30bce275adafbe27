"""Attention of rows with any number of query tokens, read from the blocks: prompts, chunks of prompts, decodes.

A tile of BLOCK_M rows holds the query heads of one GQA group for a few consecutive tokens, so that each key is loaded
once for all of them:

    row:    0   1   2   3   4   5   6   7         BLOCK_M 8, 3 query heads a KV head
    token:  t0  t0  t0  t1  t1  t1  –   –         8 // 3 = 2 tokens a tile; the last rows are idle
    head:   h0  h1  h2  h0  h1  h2  –   –

The grid is large enough for all sequences' tiles without knowing their lengths: each sequence has at most one tile that
is not full. A tile finds its sequence by bisection in `cu_seqlens_q`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.launch import Launch
from pagedkv.kernels.triton.layout import CacheArguments
from pagedkv.kernels.triton.options import head_constants, option_arguments
from pagedkv.kernels.triton.softmax import (
    attend_range,
    initial_state,
    load_slopes,
    normalized,
    scaled_for_keys,
)
from pagedkv.kernels.triton.tuning import Architecture, prefill_tiles
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions


def plan_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: CacheArguments,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    architecture: Architecture,
    first_row: int,
) -> Launch:
    """The launch that fills out: [num_tokens, num_heads, v_head_dim] for the sequences from `first_row` on.

    The sequences before it have one query token each.
    """
    tiles = prefill_tiles(architecture, q.dtype, cache.widest_dim, cache.spec.kv_dtype.bits)
    heads = head_constants(q.shape[1], cache.spec.num_kv_heads)
    block_q = tiles.block_m // heads["TILE_HEADS"]
    num_rows = metadata.num_sequences
    num_tiles = (metadata.num_tokens - first_row) // block_q + num_rows - first_row
    return Launch(
        _attention_kernel,
        (num_tiles, cache.spec.num_kv_heads * heads["HEAD_TILES"]),
        {
            "out_ptr": out,
            "q_ptr": q,
            **cache.pointers,
            "cu_seqlens_q_ptr": metadata.cu_seqlens_q,
            "seq_lens_ptr": metadata.seq_lens,
            "block_table_ptr": metadata.block_table,
            **option_arguments(options),
            "first_row": first_row,
            "num_rows": num_rows,
            "table_stride": metadata.block_table.stride(0),
            "q_stride_token": q.stride(0),
            "q_stride_head": q.stride(1),
            **cache.constants,
            **heads,
            "BLOCK_M": tiles.block_m,
            "BLOCK_Q": block_q,
            "BLOCK_N": tiles.block_n,
            "HAS_FP8": architecture.has_fp8_conversion,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit(do_not_specialize=["window", "first_row", "num_rows", "table_stride"])
def _attention_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    k_first_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    slopes_ptr,
    score_scale,
    cap,
    window,
    first_row,
    num_rows,
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
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    # A sequence's last tiles see the most tokens, so start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    row = _find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q_ptr + row)
    query_len = tl.load(cu_seqlens_q_ptr + row + 1) - first_token
    first_query = (tile - _first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q)) * BLOCK_Q
    if first_query >= query_len:
        return

    tile_rows = tl.arange(0, BLOCK_M)
    queries = first_query + tile_rows // TILE_HEADS
    group_heads = tl.program_id(1) % HEAD_TILES * TILE_HEADS + tile_rows % TILE_HEADS
    heads = kv_head * GROUP + group_heads
    is_head = group_heads < GROUP
    is_row = is_head & (tile_rows < BLOCK_Q * TILE_HEADS) & (queries < query_len)
    tokens = (first_token + queries).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM_PAD)
    q = tl.load(
        q_ptr + (tokens * q_stride_token + heads * q_stride_head)[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )

    context_len = tl.load(seq_lens_ptr + row) - query_len
    q_positions = context_len + queries
    end = context_len + tl.minimum(first_query + BLOCK_Q, query_len)
    if HAS_WINDOW:
        first_valid = tl.maximum(context_len + first_query - window + 1, 0)
        masked_begin = first_valid // BLOCK_N * BLOCK_N
    else:
        first_valid = 0
        # Every row of the tile sees all tokens before `masked_begin`.
        masked_begin = (context_len + first_query + 1) // BLOCK_N * BLOCK_N

    slopes = load_slopes(slopes_ptr, heads, is_head, HAS_ALIBI)
    score_scale = scaled_for_keys(score_scale, k_scale_ptr, kv_head, K_SCALES)
    acc, row_max, row_sum = initial_state(sinks_ptr, heads, is_head, BLOCK_M, V_HEAD_DIM_PAD, HAS_SINKS)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    if not HAS_WINDOW:
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
            table_ptr,
            0,
            masked_begin,
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
            False,
        )
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
        table_ptr,
        masked_begin,
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
    acc = normalized(acc, row_sum, v_scale_ptr, kv_head, V_SCALES)
    v_dims = tl.arange(0, V_HEAD_DIM_PAD)
    tl.store(
        out_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * V_HEAD_DIM + v_dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (v_dims < V_HEAD_DIM)[None, :],
    )


@triton.jit
def _first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q: tl.constexpr):
    """Number of a sequence's first tile. The rows before `first_row` have one token each."""
    return (tl.load(cu_seqlens_q_ptr + row) - first_row) // BLOCK_Q + row - first_row


@triton.jit
def _find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not past `tile`."""
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_past = _first_tile(cu_seqlens_q_ptr, middle, first_row, BLOCK_Q) > tile
        low = tl.where(is_past, low, middle)
        high = tl.where(is_past, middle, high)
    return low
