"""Quantizes and stores new keys and values at their slots, with one read of the source and one write of the block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.formats import (
    NO_SCALES,
    STATIC_SCALES,
    TOKEN_SCALES,
    encode_elements,
    token_scales,
)
from pagedkv.kernels.triton.launch import Launch
from pagedkv.kernels.triton.layout import CacheArguments
from pagedkv.kernels.triton.tuning import Architecture, store_tile_tokens
from pagedkv.plugin.attention_metadata import AttentionMetadata


def plan_store(
    cache: CacheArguments, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, architecture: Architecture
) -> Launch:
    """The launch that writes k: [num_tokens, num_kv_heads, head_dim] and v: [num_tokens, num_kv_heads, v_head_dim]."""
    spec, pointers = cache.spec, cache.pointers
    num_tokens = metadata.num_tokens
    tokens = store_tile_tokens(architecture, cache.widest_dim)
    return Launch(
        _store_kernel,
        (triton.cdiv(num_tokens, tokens), spec.num_kv_heads),
        {
            "k_ptr": k,
            "v_ptr": v,
            "slots_ptr": metadata.slot_mapping,
            **{name: pointers[name] for name in ("k_cache_ptr", "v_cache_ptr", "k_scale_ptr", "v_scale_ptr")},
            "num_tokens": num_tokens,
            "k_stride_token": k.stride(0),
            "k_stride_head": k.stride(1),
            "v_stride_token": v.stride(0),
            "v_stride_head": v.stride(1),
            **cache.constants,
            "MAX_VALUE": cache.format.max_value,
            "TOKENS": tokens,
            "HAS_FP8": architecture.has_fp8_conversion,
        },
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    V_HEAD_DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    is_stored = slots >= 0
    rows = (slots // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    sources = tokens.to(tl.int64)
    _store_rows(
        k_ptr + sources * k_stride_token + head * k_stride_head,
        k_cache_ptr,
        k_scale_ptr,
        rows,
        is_stored,
        head,
        HEAD_DIM,
        HEAD_DIM_PAD,
        FORMAT,
        K_SCALES,
        MAX_VALUE,
        HAS_FP8,
    )
    _store_rows(
        v_ptr + sources * v_stride_token + head * v_stride_head,
        v_cache_ptr,
        v_scale_ptr,
        rows,
        is_stored,
        head,
        V_HEAD_DIM,
        V_HEAD_DIM_PAD,
        FORMAT,
        V_SCALES,
        MAX_VALUE,
        HAS_FP8,
    )


@triton.jit
def _store_rows(
    source_ptrs,
    cache_ptr,
    scale_ptr,
    rows,
    is_stored,
    head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    dims = tl.arange(0, DIM_PAD)
    mask = is_stored[:, None] & (dims < DIM)[None, :]
    x = tl.load(source_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    if SCALES != NO_SCALES:
        x = x.to(tl.float32)
    if SCALES == TOKEN_SCALES:
        scales = token_scales(x, MAX_VALUE)
        tl.store(scale_ptr + rows, scales, mask=is_stored)
        x = x / scales[:, None]
    if SCALES == STATIC_SCALES:
        x = x / tl.load(scale_ptr + head)
    elements = encode_elements(x, FORMAT, MAX_VALUE, HAS_FP8, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + rows[:, None] * DIM + dims[None, :], elements, mask=mask)
