"""Paged batches of random tokens, and dense attention to compare kernels with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.plugin.attention_metadata import PADDING_SLOT, AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.model_spec import AttentionSpec

_GARBAGE_BLOCKS = (-1, -(2**31), 2**31 - 1, 2**30)
"""Values in block tables after a row's last block. Reading any of them is out of bounds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch."""

    num_cached_tokens: int
    """Tokens stored before the step."""
    num_new_tokens: int
    """Tokens of the step; 0 is a padding row, which has one query token."""
    blocks: torch.Tensor
    """[>= needed] int64 ids of the row's blocks, in order, on the host."""

    @property
    def seq_len(self) -> int:
        return self.num_cached_tokens + self.num_new_tokens

    @property
    def num_queries(self) -> int:
        return max(1, self.num_new_tokens)

    def slots(self, block_size: int) -> torch.Tensor:
        """[seq_len] int64 slots of the row's tokens, in order, on the host."""
        tokens = torch.arange(self.seq_len)
        return self.blocks[tokens // block_size] * block_size + tokens % block_size


def make_rows(
    lengths: Sequence[tuple[int, int]], block_size: int, num_blocks: int, generator: torch.Generator
) -> list[Row]:
    """Makes rows of (num_cached_tokens, num_new_tokens), each with its own random blocks. Single queries come first."""
    ids = torch.randperm(num_blocks, generator=generator)
    rows = []
    for num_cached, num_new in sorted(lengths, key=lambda length: length[1] > 1):
        needed = -(-(num_cached + num_new) // block_size)
        rows.append(Row(num_cached, num_new, ids[:needed]))
        ids = ids[needed:]
    return rows


def count_blocks(lengths: Sequence[tuple[int, int]], block_size: int) -> int:
    """Counts the blocks that rows of (num_cached_tokens, num_new_tokens) need."""
    return sum(-(-(num_cached + num_new) // block_size) for num_cached, num_new in lengths)


def make_metadata(rows: Sequence[Row], block_size: int, device: torch.device) -> AttentionMetadata:
    """Makes the step that computes each row's new tokens. Block table entries after a row's end are out of range."""
    num_queries = [row.num_queries for row in rows]
    max_blocks = max(len(row.blocks) for row in rows) + 2
    garbage = torch.tensor(_GARBAGE_BLOCKS, dtype=torch.int32)
    block_table = garbage[torch.arange(len(rows) * max_blocks) % len(garbage)].view(len(rows), max_blocks)
    for line, row in zip(block_table, rows, strict=True):
        needed = -(-row.seq_len // block_size)
        line[:needed] = row.blocks[:needed].int()
    padding = torch.tensor([PADDING_SLOT])
    slots = [row.slots(block_size)[row.num_cached_tokens :] if row.num_new_tokens else padding for row in rows]
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *num_queries]).cumsum(0).int().to(device),
        seq_lens=torch.tensor([row.seq_len for row in rows], dtype=torch.int32, device=device),
        block_table=block_table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(num_queries),
        max_seq_len=max(row.seq_len for row in rows),
        num_decodes=sum(count == 1 for count in num_queries),
    )


def store_tokens(
    kernels: AttentionKernels, storage: KVStorage, rows: Sequence[Row], k: torch.Tensor, v: torch.Tensor
) -> None:
    """Stores whole sequences, as two steps: the cached tokens, then the new ones.

    Args:
        k: [sum of seq_len, num_kv_heads, head_dim], row by row; v: with v_head_dim.
    """
    block_size, device = storage.spec.block_size, k.device
    seq_lens = [row.seq_len for row in rows]
    steps = (
        [(row, 0, row.num_cached_tokens) for row in rows],
        [(row, row.num_cached_tokens, row.seq_len) for row in rows],
    )
    for step in steps:
        parts = [
            (Row(start, end - start, row.blocks), row_k[start:end], row_v[start:end])
            for (row, start, end), row_k, row_v in zip(
                step, torch.split(k, seq_lens), torch.split(v, seq_lens), strict=True
            )
            if end > start
        ]
        parts.sort(key=lambda part: part[0].num_new_tokens > 1)
        if parts:
            step_rows, ks, vs = zip(*parts, strict=True)
            kernels.store(storage, torch.cat(ks), torch.cat(vs), make_metadata(step_rows, block_size, device))


def make_options(spec: AttentionSpec, device: torch.device, generator: torch.Generator) -> AttentionOptions:
    """Makes the options that a model of this spec would pass, with random sinks and the slopes of the ALiBi paper."""
    heads = torch.arange(1, spec.num_heads + 1)
    return AttentionOptions(
        scale=spec.head_dim**-0.5,
        sliding_window=spec.sliding_window,
        softcap=spec.softcap,
        sinks=torch.randn(spec.num_heads, generator=generator).to(device) if spec.has_sinks else None,
        alibi_slopes=(2.0 ** (-8.0 * heads / spec.num_heads)).to(device) if spec.has_alibi else None,
    )


def attend_exactly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Causal attention of one sequence's last queries, all scores written out, computed in `dtype`.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [seq_len, num_kv_heads, head_dim].
        v: [seq_len, num_kv_heads, v_head_dim].

    Returns:
        [num_queries, num_heads, v_head_dim] in `dtype`.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q @ k.transpose(1, 2) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    bias = _bias(q.shape[1], k.shape[1], options, q.device)
    # The running maximum and the sum are float32 in every fused attention, even if products are narrower.
    scores = scores.to(torch.promote_types(dtype, torch.float32)) + bias
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].to(dtype)
    return (weights @ v).transpose(0, 1)


def attend_as_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, dtype: torch.dtype
) -> torch.Tensor:
    """Like `attend_exactly`, with torch's `scaled_dot_product_attention` in `dtype` if it supports all options."""
    if options.softcap is not None or options.sinks is not None:
        return attend_exactly(q, k, v, options, dtype)
    bias = _bias(q.shape[0], k.shape[0], options, q.device).to(dtype)
    group = q.shape[1] // k.shape[1]
    heads_first = [
        x.to(dtype).transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    ]
    out = scaled_dot_product_attention(
        heads_first[0], heads_first[1], heads_first[2], attn_mask=bias[None], scale=options.scale
    )
    return out[0].transpose(0, 1)


def _bias(num_queries: int, num_keys: int, options: AttentionOptions, device: torch.device) -> torch.Tensor:
    """[num_heads or 1, num_queries, num_keys] float64: slopes times distance, -inf for keys outside the mask."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distances = (torch.arange(num_keys, device=device) - queries).double()
    hidden = distances > 0
    if options.sliding_window is not None:
        hidden |= distances <= -options.sliding_window
    if options.alibi_slopes is None:
        return torch.zeros_like(distances).masked_fill(hidden, -torch.inf)[None]
    return (options.alibi_slopes.double()[:, None, None] * distances).masked_fill(hidden, -torch.inf)
