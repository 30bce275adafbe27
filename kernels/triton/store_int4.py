"""Stores new keys and values in 4 bits, and rotates the output of attention over rotated values back.

When tokens are added to a block of keys, the whole block is quantized again. Tokens of one block are next to each other
in `slot_mapping`: the program of the first of them does the work, the programs of the others end at once. So the grid
depends only on the number of tokens.

    slots      37 38 39 | 7 | 48 49         blocks of 16: programs 0, 3 and 4 quantize blocks 2, 0 and 3
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.int4 import GROUP_SIZE, best_codes, finite, rotated, round_to_int4
from pagedkv.kernels.triton.launch import Launch
from pagedkv.kernels.triton.layout import CacheArguments
from pagedkv.plugin.attention_metadata import AttentionMetadata

_TILE_ELEMENTS = 2048
_NO_CODE = tl.constexpr(-1e30)


def plan_store_int4(
    cache: CacheArguments, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata
) -> tuple[Launch, Launch]:
    """The launches that write k: [num_tokens, num_kv_heads, head_dim] and v: [num_tokens, num_kv_heads, v_head_dim]."""
    spec, num_tokens = cache.spec, metadata.num_tokens
    pointers = cache.pointers
    dim_pad, v_dim_pad = (triton.next_power_of_2(dim) for dim in (spec.head_dim, spec.v_head_dim))
    channels = max(min(dim_pad, _TILE_ELEMENTS // spec.block_size), 16)
    tokens = max(_TILE_ELEMENTS // v_dim_pad, 1)
    common = {
        "slots_ptr": metadata.slot_mapping,
        "num_tokens": num_tokens,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "BLOCK_SIZE": spec.block_size,
    }
    store_keys = Launch(
        _store_keys_kernel,
        (num_tokens, spec.num_kv_heads, triton.cdiv(dim_pad, channels)),
        {
            **common,
            "source_ptr": k,
            "cache_ptr": pointers["k_cache_ptr"],
            "first_ptr": pointers["k_first_ptr"],
            "scale_ptr": pointers["k_scale_ptr"],
            "zero_ptr": pointers["k_zero_ptr"],
            "stride_token": k.stride(0),
            "stride_head": k.stride(1),
            "DIM": spec.head_dim,
            "CHANNELS": channels,
        },
        num_warps=4,
    )
    store_values = Launch(
        _store_values_kernel,
        (triton.cdiv(num_tokens, tokens), spec.num_kv_heads),
        {
            **common,
            "source_ptr": v,
            "cache_ptr": pointers["v_cache_ptr"],
            "scale_ptr": pointers["v_scale_ptr"],
            "zero_ptr": pointers["v_zero_ptr"],
            "stride_token": v.stride(0),
            "stride_head": v.stride(1),
            "DIM": spec.v_head_dim,
            "DIM_PAD": v_dim_pad,
            "TOKENS": tokens,
        },
        num_warps=4,
    )
    return store_keys, store_values


def plan_rotate(x: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch that fills out: [..., dim] with the rotated rows of x: [..., dim] float32, both contiguous."""
    dim = x.shape[-1]
    dim_pad = triton.next_power_of_2(dim)
    rows = max(_TILE_ELEMENTS // dim_pad, 1)
    num_rows = x.numel() // dim
    return Launch(
        _rotate_kernel,
        (triton.cdiv(num_rows, rows),),
        {"x_ptr": x, "out_ptr": out, "num_rows": num_rows, "DIM": dim, "DIM_PAD": dim_pad, "ROWS": rows},
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _store_keys_kernel(
    source_ptr,
    slots_ptr,
    cache_ptr,
    first_ptr,
    scale_ptr,
    zero_ptr,
    num_tokens,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    first_new = slot % BLOCK_SIZE
    slot_before = tl.load(slots_ptr + token - 1, mask=token > 0, other=-2)
    if (slot < 0) | ((slot_before == slot - 1) & (first_new > 0)):
        return

    # Which of the block's slots hold new tokens, and which held tokens before.
    offsets = tl.arange(0, BLOCK_SIZE)
    sources = token + offsets - first_new.to(tl.int32)
    may_come = (offsets >= first_new) & (sources < num_tokens)
    slots = tl.load(slots_ptr + sources, mask=may_come, other=-1)
    is_new = may_come & (slots == slot - first_new + offsets)
    is_known = is_new | (offsets < first_new)

    head_block = (slot // BLOCK_SIZE) * NUM_KV_HEADS + head
    first_dim = tl.program_id(2) * CHANNELS
    dims = first_dim + tl.arange(0, CHANNELS)
    is_dim = dims < DIM
    new_ptrs = source_ptr + sources.to(tl.int64)[:, None] * stride_token + head * stride_head + dims[None, :]
    x = finite(tl.load(new_ptrs, mask=is_new[:, None] & is_dim[None, :], other=0.0))
    least_codes = tl.full([1, CHANNELS], _NO_CODE, dtype=tl.float32)
    if first_new > 0:
        # Old tokens are used with their stored values.
        old_codes = tl.load(scale_ptr + head_block * DIM + dims, mask=is_dim, other=0).to(tl.float32)[None, :]
        old_zeros = tl.load(zero_ptr + head_block * DIM + dims, mask=is_dim, other=0).to(tl.float32)[None, :]
        is_old = (offsets < first_new)[:, None] & is_dim[None, :]
        bytes_ptrs = cache_ptr + (head_block * BLOCK_SIZE + offsets)[:, None] * (DIM // 2) + (dims // 2)[None, :]
        nibbles = (tl.load(bytes_ptrs, mask=is_old, other=0) >> (dims % 2 * 4).to(tl.uint8)[None, :]) & 15
        fours = tl.load(first_ptr + head_block * (DIM // 4) + dims // 4, mask=is_dim, other=0)
        quarters = ((fours >> (dims % 4 * 2).to(tl.uint8)) & 3).to(tl.float32) * 0.25
        numbers = nibbles.to(tl.float32) + tl.where((offsets == 0)[:, None], quarters[None, :], 0.0)
        x = tl.where(is_old, (numbers + old_zeros) * tl.exp2(old_codes / 8.0), x)
        least_codes = old_codes

    substeps = tl.where(offsets == 0, 4.0, 1.0)[:, None]
    codes = best_codes(x, is_known[:, None], least_codes, substeps, 0)
    elements, zeros = round_to_int4(x, is_known[:, None], codes, substeps, 0)
    nibbles = tl.floor(elements)
    quarters = tl.sum(tl.where((offsets == 0)[:, None], (elements - nibbles) * 4.0, 0.0), axis=0)
    # The whole block must be read before any of it is written.
    tl.debug_barrier()
    packed = _packed(nibbles, BLOCK_SIZE, CHANNELS, 2)
    places = first_dim // 2 + tl.arange(0, CHANNELS // 2)
    tl.store(
        cache_ptr + (head_block * BLOCK_SIZE + offsets)[:, None] * (DIM // 2) + places[None, :],
        packed,
        mask=is_known[:, None] & (places < DIM // 2)[None, :],
    )
    first_places = first_dim // 4 + tl.arange(0, CHANNELS // 4)[None, :]
    tl.store(
        first_ptr + head_block * (DIM // 4) + first_places,
        _packed(quarters[None, :], 1, CHANNELS, 4),
        mask=first_places < DIM // 4,
    )
    tl.store(scale_ptr + head_block * DIM + dims[None, :], codes.to(tl.int8), mask=is_dim[None, :])
    tl.store(zero_ptr + head_block * DIM + dims[None, :], zeros.to(tl.int8), mask=is_dim[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _store_values_kernel(
    source_ptr,
    slots_ptr,
    cache_ptr,
    scale_ptr,
    zero_ptr,
    num_tokens,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    WIDTH: tl.constexpr = GROUP_SIZE if GROUP_SIZE < DIM_PAD else DIM_PAD
    GROUPS: tl.constexpr = DIM_PAD // WIDTH
    NUM_GROUPS: tl.constexpr = (DIM + GROUP_SIZE - 1) // GROUP_SIZE
    head = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    is_stored = slots >= 0
    rows = (slots // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    dims = tl.arange(0, DIM_PAD)
    source_ptrs = source_ptr + tokens.to(tl.int64)[:, None] * stride_token + head * stride_head + dims[None, :]
    v = tl.load(source_ptrs, mask=is_stored[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    x = finite(tl.reshape(rotated(v, DIM, DIM_PAD, TOKENS), (TOKENS, GROUPS, WIDTH)))

    groups = tl.arange(0, GROUPS)[None, :]
    is_real = (groups[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]) < DIM
    is_known = is_real & (tl.zeros([TOKENS, 1, 1], dtype=tl.int32) == 0)
    codes = best_codes(x, is_known, _NO_CODE, 1.0, 2)
    elements, zeros = round_to_int4(x, is_known, codes, 1.0, 2)
    packed = _packed(tl.reshape(elements, (TOKENS, DIM_PAD)), TOKENS, DIM_PAD, 2)
    places = tl.arange(0, DIM_PAD // 2)
    mask = is_stored[:, None] & (places < DIM // 2)[None, :]
    tl.store(cache_ptr + rows[:, None] * (DIM // 2) + places[None, :], packed, mask=mask)
    group_rows = rows[:, None] * NUM_GROUPS + groups
    mask = is_stored[:, None] & (groups < NUM_GROUPS)
    tl.store(scale_ptr + group_rows, tl.reshape(codes, (TOKENS, GROUPS)).to(tl.int8), mask=mask)
    tl.store(zero_ptr + group_rows, tl.reshape(zeros, (TOKENS, GROUPS)).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(x_ptr, out_ptr, num_rows, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    mask = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    places = rows[:, None] * DIM + dims[None, :]
    x = rotated(tl.load(x_ptr + places, mask=mask, other=0.0), DIM, DIM_PAD, ROWS)
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _packed(elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Packs whole numbers into bytes, the first lowest: [ROWS, COLUMNS] to [ROWS, COLUMNS / PER_BYTE] uint8."""
    BITS: tl.constexpr = 8 // PER_BYTE
    parts = tl.reshape(elements.to(tl.int32), (ROWS, COLUMNS // PER_BYTE, PER_BYTE))
    return tl.sum(parts << (tl.arange(0, PER_BYTE) * BITS)[None, None, :], axis=2).to(tl.uint8)
