"""Fused kernels between a decoder layer's large products, each in one pass over the rows: norms, rotary, gates.

All compute in float32, whatever the tensors' dtypes. A grid depends only on shapes, so that a captured graph can be
replayed with other tokens, positions and logit rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.launch import LOG2_E, Launch
from pagedkv.kernels.triton.softmax import tanh
from pagedkv.plugin.decoder import Activation, DecoderLayer, DecoderShape
from pagedkv.plugin.interface import ModelInput

MAX_HIDDEN_SIZE = 16384
"""Largest row, because one program holds a row in its registers."""
_TILE_ELEMENTS = 1024
_LOG2_E = tl.constexpr(LOG2_E)


def plan_embed(
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    out: torch.Tensor,
    shape: DecoderShape,
) -> Launch:
    """The launch that fills residual: [num_tokens, hidden_size] float32 with embeddings and `out` with their norm."""
    return _plan_norm(out, norm, shape, new_residual_ptr=residual, x_ptr=embedding, token_ids_ptr=token_ids)


def plan_add_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    x_norm: torch.Tensor | None,
    norm: torch.Tensor,
    out: torch.Tensor,
    shape: DecoderShape,
    new_residual: torch.Tensor | None,
    rows: torch.Tensor | None = None,
) -> Launch:
    """The launch of new_residual = residual[rows] + x_norm?(x) and out = norm(new_residual).

    Args:
        residual: [num_tokens, hidden_size] float32.
        x: [num_rows, hidden_size], contiguous.
        out: as x.
        new_residual: [num_rows, hidden_size] float32; may be `residual` if `rows` is None. None if it is not needed.
        rows: [num_rows] int64; None means all rows.
    """
    return _plan_norm(
        out,
        norm,
        shape,
        new_residual_ptr=new_residual,
        x_ptr=x,
        residual_ptr=residual,
        x_norm_ptr=x_norm,
        rows_ptr=rows,
    )


def plan_rotary(qkv: torch.Tensor, batch: ModelInput, layer: DecoderLayer, shape: DecoderShape) -> Launch | None:
    """The launch that normalizes and rotates queries and keys in place; None if there is nothing to do.

    Args:
        qkv: [num_tokens, (num_heads + 2 × num_kv_heads) × head_dim], contiguous.
    """
    spec, rotary = shape.attention, layer.rotary
    has_norm = layer.query_norm is not None or layer.key_norm is not None
    if rotary is None and not has_norm:
        return None
    pairs = 0 if rotary is None else rotary.cos.shape[1]
    rest = spec.head_dim - 2 * pairs if has_norm else 0
    num_heads = spec.num_heads + spec.num_kv_heads
    tile = min(triton.next_power_of_2(num_heads), max(_TILE_ELEMENTS // triton.next_power_of_2(spec.head_dim), 1))
    return Launch(
        _rotary_kernel,
        (qkv.shape[0], triton.cdiv(num_heads, tile)),
        {
            "qkv_ptr": qkv,
            "positions_ptr": batch.positions,
            "cos_ptr": None if rotary is None else rotary.cos,
            "sin_ptr": None if rotary is None else rotary.sin,
            "query_norm_ptr": layer.query_norm,
            "key_norm_ptr": layer.key_norm,
            "eps": shape.norm_eps,
            "token_stride": qkv.stride(0),
            "NUM_QUERY_HEADS": spec.num_heads,
            "NUM_ROTATED_HEADS": num_heads,
            "HEAD_DIM": spec.head_dim,
            "PAIRS": pairs,
            "PAIRS_PAD": triton.next_power_of_2(max(pairs, 1)),
            "REST": rest,
            "REST_PAD": triton.next_power_of_2(max(rest, 1)),
            "TILE": tile,
        },
        num_warps=4,
    )


def plan_gate(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation) -> Launch:
    """The launch of out = activation(gate) × up: [num_rows, size] of gate_up: [num_rows, 2 × size], contiguous."""
    num_rows, size = out.shape
    tile = min(triton.next_power_of_2(size), _TILE_ELEMENTS)
    return Launch(
        _gate_kernel,
        (num_rows, triton.cdiv(size, tile)),
        {"gate_up_ptr": gate_up, "out_ptr": out, "size": size, "ACTIVATION": activation, "TILE": tile},
        num_warps=4,
    )


def _plan_norm(
    out: torch.Tensor,
    norm: torch.Tensor,
    shape: DecoderShape,
    *,
    new_residual_ptr: torch.Tensor | None,
    x_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor | None = None,
    residual_ptr: torch.Tensor | None = None,
    x_norm_ptr: torch.Tensor | None = None,
    rows_ptr: torch.Tensor | None = None,
) -> Launch:
    width = triton.next_power_of_2(shape.hidden_size)
    return Launch(
        _norm_kernel,
        (out.shape[0],),
        {
            "out_ptr": out,
            "new_residual_ptr": new_residual_ptr,
            "x_ptr": x_ptr,
            "token_ids_ptr": token_ids_ptr,
            "residual_ptr": residual_ptr,
            "rows_ptr": rows_ptr,
            "x_norm_ptr": x_norm_ptr,
            "norm_ptr": norm,
            "embedding_scale": shape.embedding_scale,
            "eps": shape.norm_eps,
            "HIDDEN_SIZE": shape.hidden_size,
            "WIDTH": width,
        },
        num_warps=min(max(width // 512, 1), 16),
    )


@triton.jit
def _norm_kernel(
    out_ptr,
    new_residual_ptr,
    x_ptr,
    token_ids_ptr,
    residual_ptr,
    rows_ptr,
    x_norm_ptr,
    norm_ptr,
    embedding_scale,
    eps,
    HIDDEN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < HIDDEN_SIZE
    if token_ids_ptr is not None:
        token = tl.load(token_ids_ptr + row).to(tl.int64)
        embedding = tl.load(x_ptr + token * HIDDEN_SIZE + dims, mask=is_dim, other=0.0)
        residual = embedding.to(tl.float32) * embedding_scale
    else:
        x = tl.load(x_ptr + row * HIDDEN_SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
        if x_norm_ptr is not None:
            x = _normed(x, x_norm_ptr, dims, is_dim, eps, HIDDEN_SIZE)
        source = row
        if rows_ptr is not None:
            source = tl.load(rows_ptr + row).to(tl.int64)
        residual = x + tl.load(residual_ptr + source * HIDDEN_SIZE + dims, mask=is_dim, other=0.0)
    if new_residual_ptr is not None:
        tl.store(new_residual_ptr + row * HIDDEN_SIZE + dims, residual, mask=is_dim)
    out = _normed(residual, norm_ptr, dims, is_dim, eps, HIDDEN_SIZE)
    tl.store(out_ptr + row * HIDDEN_SIZE + dims, out.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def _normed(x, weight_ptr, dims, is_dim, eps, SIZE: tl.constexpr):
    """The RMS norm of a row: [WIDTH], zero where not `is_dim`."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    return x * inverse * tl.load(weight_ptr + dims, mask=is_dim, other=0.0)


@triton.jit
def _rotary_kernel(
    qkv_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    token_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_ROTATED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """A token's heads, TILE of them: channels 0 to PAIRS turn against the PAIRS behind them; REST ones are normed."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_head = heads < NUM_ROTATED_HEADS
    is_query = heads < NUM_QUERY_HEADS
    head_ptrs = (qkv_ptr + token * token_stride + heads * HEAD_DIM)[:, None]
    pairs = tl.arange(0, PAIRS_PAD)
    is_pair = is_head[:, None] & (pairs < PAIRS)[None, :]
    others = 2 * PAIRS + tl.arange(0, REST_PAD)
    is_other = is_head[:, None] & (others < 2 * PAIRS + REST)[None, :]
    squares = tl.zeros([TILE], dtype=tl.float32)
    if PAIRS > 0:
        first = tl.load(head_ptrs + pairs[None, :], mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(head_ptrs + PAIRS + pairs[None, :], mask=is_pair, other=0.0).to(tl.float32)
        squares += tl.sum(first * first + second * second, axis=1)
    if REST > 0:
        rest = tl.load(head_ptrs + others[None, :], mask=is_other, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)

    inverses = tl.rsqrt(squares / HEAD_DIM + eps)
    if REST > 0:
        rest *= _head_factors(query_norm_ptr, key_norm_ptr, is_query, inverses, others, 2 * PAIRS + REST)
        tl.store(head_ptrs + others[None, :], rest.to(qkv_ptr.dtype.element_ty), mask=is_other)
    if PAIRS > 0:
        first *= _head_factors(query_norm_ptr, key_norm_ptr, is_query, inverses, pairs, PAIRS)
        second *= _head_factors(query_norm_ptr, key_norm_ptr, is_query, inverses, pairs + PAIRS, 2 * PAIRS)
        table_row = tl.load(positions_ptr + token).to(tl.int64) * PAIRS
        cos = tl.load(cos_ptr + table_row + pairs, mask=pairs < PAIRS, other=0.0)[None, :]
        sin = tl.load(sin_ptr + table_row + pairs, mask=pairs < PAIRS, other=0.0)[None, :]
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        tl.store(head_ptrs + pairs[None, :], turned_first.to(qkv_ptr.dtype.element_ty), mask=is_pair)
        tl.store(head_ptrs + PAIRS + pairs[None, :], turned_second.to(qkv_ptr.dtype.element_ty), mask=is_pair)


@triton.jit
def _head_factors(query_norm_ptr, key_norm_ptr, is_query, inverses, dims, end):
    """What each head's channels are multiplied by: [TILE, dims]; 1 for heads that have no norm."""
    no_factors = tl.full([1, 1], 1.0, dtype=tl.float32)
    query_factors = no_factors
    key_factors = no_factors
    if query_norm_ptr is not None:
        query_factors = inverses[:, None] * tl.load(query_norm_ptr + dims, mask=dims < end, other=0.0)[None, :]
    if key_norm_ptr is not None:
        key_factors = inverses[:, None] * tl.load(key_norm_ptr + dims, mask=dims < end, other=0.0)[None, :]
    return tl.where(is_query[:, None], query_factors, key_factors)


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, size, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * size + columns, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp2(-gate * _LOG2_E))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = 0.5 * gate * (1.0 + tanh(inner))
    tl.store(out_ptr + row * size + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=is_column)
