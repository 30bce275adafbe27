"""The `reference` kernels: plain torch, on any device. Slower than the others, but easy to check by reading.

Keys and values of a layer are stored token-major, so that the gathered blocks of a row are its tokens in order. Layout
and scales are in `pagedkv.kernels.reference_storage`. Gathered blocks are dequantized during attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.kernels.quantization import rotate
from pagedkv.kernels.reference_storage import (
    allocate_blocks,
    load_blocks,
    store_slots,
    unsupported_format_reasons,
)
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.step_plan import BlockCopy

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_SCORES = 2**24
"""Most scores in memory at once. Queries of a long prompt are computed in chunks below this."""


class ReferenceKernels:
    """Implements `AttentionKernels` for every KV dtype of `pagedkv.plugin.kv_dtypes`."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "reference"
    can_capture_graphs = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def create(cls, device: torch.device) -> Self:
        return cls(device)

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        reasons = unsupported_format_reasons(cache_spec.kv_dtype)
        if dtype not in KV_DTYPE_OF_TORCH:
            reasons.append(f"queries of {dtype} are not implemented")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
        return reasons

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        return allocate_blocks(cache_spec, num_blocks, self._device)

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        is_real = metadata.slot_mapping >= 0
        store_slots(storage, metadata.slot_mapping[is_real], k[is_real], v[is_real])

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        if not storage.spec.kv_dtype.has_rotated_values:
            return self._attend(q, storage, metadata, options)
        # A weighted sum of rotated values is the rotated sum of values: rotate one row back, not the whole context.
        return rotate(self._attend(q.float(), storage, metadata, options)).to(q.dtype)

    def _attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Attention over the values as stored in blocks (not rotated back)."""
        out = q.new_zeros(q.shape[0], q.shape[1], storage.spec.v_head_dim)
        seq_lens: list[int] = metadata.seq_lens.tolist()
        query_starts: list[int] = metadata.cu_seqlens_q.tolist()
        for rows in _group_decodes(seq_lens[: metadata.num_decodes], storage.spec.block_size, options.sliding_window):
            index = torch.tensor(rows, device=q.device)
            out[index] = _attend_decodes(q[index], storage, metadata, index, options)
        for row in range(metadata.num_decodes, metadata.num_sequences):
            queries = slice(query_starts[row], query_starts[row + 1])
            out[queries] = _attend_prefill(q[queries], storage, metadata.block_table[row], seq_lens[row], options)
        return out

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        sources, targets = ([copy.source for copy in copies], [copy.target for copy in copies])
        for tensor in storage.tensors.values():
            tensor[targets] = tensor[sources]

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = storage.spec.block_size
        blocks, places = torch.unique(slots // block_size, return_inverse=True)
        k, v = (numbers[places, slots % block_size].float() for numbers in load_blocks(storage, blocks))
        return k, rotate(v) if storage.spec.kv_dtype.has_rotated_values else v


def _first_visible(position: int, sliding_window: int | None) -> int:
    """Returns the first token that the query at `position` sees."""
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _group_decodes(seq_lens: Sequence[int], block_size: int, sliding_window: int | None) -> list[list[int]]:
    """Groups rows that are padded to one length and computed together. Their lengths differ by less than a factor of 2.

    Padding rows are in no group.
    """
    groups = defaultdict(list)
    for row, seq_len in enumerate(seq_lens):
        if seq_len:
            first_block = _first_visible(seq_len - 1, sliding_window) // block_size
            num_blocks = (seq_len - 1) // block_size + 1 - first_block
            groups[num_blocks.bit_length()].append(row)
    return list(groups.values())


def _attend_decodes(
    q: torch.Tensor,
    storage: KVStorage,
    metadata: AttentionMetadata,
    rows: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """One query a row, q: [num_rows, num_heads, head_dim], over the rows' gathered blocks."""
    block_size = storage.spec.block_size
    q_positions = metadata.seq_lens[rows].long() - 1
    window = options.sliding_window
    first_tokens = torch.zeros_like(q_positions) if window is None else (q_positions - window + 1).clamp(min=0)
    first_blocks = first_tokens // block_size
    last_blocks = q_positions // block_size
    num_blocks = int((last_blocks - first_blocks).max()) + 1
    # A row's columns past its last block repeat that block, whose id is valid; the tokens are masked by position.
    columns = first_blocks[:, None] + torch.arange(num_blocks, device=q.device)
    blocks = metadata.block_table[rows[:, None], columns.minimum(last_blocks[:, None])].long()
    k, v = (numbers.flatten(1, 2) for numbers in load_blocks(storage, blocks))
    k_positions = (first_blocks * block_size)[:, None] + torch.arange(num_blocks * block_size, device=q.device)
    # 0 × NaN is NaN, so clear the values past the end. Keys are masked by their scores.
    v = v.masked_fill((k_positions > q_positions[:, None])[:, :, None, None], 0)
    return _attend_dense(q[:, None], k, v, q_positions[:, None], k_positions, options)[:, 0]


def _attend_prefill(
    q: torch.Tensor, storage: KVStorage, blocks: torch.Tensor, seq_len: int, options: AttentionOptions
) -> torch.Tensor:
    """The last queries of one sequence, q: [num_queries, num_heads, head_dim], over its `seq_len` tokens."""
    if seq_len == 0:
        return q.new_zeros(*q.shape[:2], storage.spec.v_head_dim)
    num_queries, num_heads, _ = q.shape
    block_size = storage.spec.block_size
    first_query = seq_len - num_queries
    first_block = _first_visible(first_query, options.sliding_window) // block_size
    first_token = first_block * block_size
    blocks = blocks[first_block : (seq_len - 1) // block_size + 1].long()
    k, v = (numbers.flatten(0, 1)[: seq_len - first_token] for numbers in load_blocks(storage, blocks))
    k_positions = torch.arange(first_token, seq_len, device=q.device)
    q_positions = torch.arange(first_query, seq_len, device=q.device)
    if _is_plain(options) and options.sliding_window is None and first_query == 0:
        return _attend_fused(q, k, v, None, options.scale)
    chunk = max(1, _MAX_SCORES // (k.shape[0] * (1 if _is_plain(options) else num_heads)))
    outputs = []
    for start in range(0, num_queries, chunk):
        positions = q_positions[start : start + chunk]
        # Leave out keys at both ends that no query of the chunk sees.
        low = max(0, _first_visible(first_query + start, options.sliding_window) - first_token)
        keys = slice(low, first_query + start + len(positions) - first_token)
        outputs.append(_attend_chunk(q[start : start + chunk], k[keys], v[keys], positions, k_positions[keys], options))
    return torch.cat(outputs)


def _attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Some queries of one sequence, q: [num_queries, num_heads, head_dim], and all keys that they see."""
    if _is_plain(options):
        visible = _visible(k_positions - q_positions[:, None], options.sliding_window)
        return _attend_fused(q, k, v, visible, options.scale)
    return _attend_dense(q[None], k[None], v[None], q_positions[None], k_positions[None], options)[0]


def _is_plain(options: AttentionOptions) -> bool:
    """Whether torch's fused attention supports all options."""
    return options.softcap is None and options.sinks is None and options.alibi_slopes is None


def _visible(distances: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Whether a query sees a key; `distances` are key position minus query position."""
    visible = distances <= 0
    return visible if sliding_window is None else visible & (distances > -sliding_window)


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's fused attention of one sequence; `visible`: [num_queries, num_keys], None is causal from token 0."""
    dtype = torch.promote_types(q.dtype, k.dtype)
    queries, keys, values = (x.to(dtype).transpose(0, 1)[None] for x in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        queries, keys, values, visible, is_causal=visible is None, scale=scale, enable_gqa=is_grouped
    )
    return out[0].transpose(0, 1).to(q.dtype)


def _attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention with all scores written out, in float32.

    Args:
        q: [num_rows, num_queries, num_heads, head_dim].
        k: [num_rows, num_keys, num_kv_heads, head_dim].
        v: [num_rows, num_keys, num_kv_heads, v_head_dim].
        q_positions: [num_rows, num_queries].
        k_positions: [num_rows, num_keys].

    Returns:
        [num_rows, num_queries, num_heads, v_head_dim] in the dtype of q.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    grouped = q.float().view(num_rows, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ k.float().permute(0, 2, 3, 1)
    scores = scores.view(num_rows, num_kv_heads, group, num_queries, -1).mul_(options.scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    distances = k_positions[:, None, :] - q_positions[:, :, None]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.float().view(num_kv_heads, -1, 1, 1)
        scores += slopes * distances[:, None, None]
    scores.masked_fill_(~_visible(distances, options.sliding_window)[:, None, None], -torch.inf)
    weights = _softmax(scores, options.sinks)
    out = weights.flatten(2, 3) @ v.float().transpose(1, 2)
    out = out.view(num_rows, num_kv_heads, group, num_queries, -1)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dim of scores: [num_rows, num_kv_heads, group, num_queries, num_keys]."""
    if sinks is None:
        return scores.softmax(-1)
    num_kv_heads, group = scores.shape[1:3]
    column = sinks.float().view(num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
