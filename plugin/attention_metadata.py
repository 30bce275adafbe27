"""The metadata that kernels get in one step, and the context that passes it through a model's layers.

A block table turns a token's place in its sequence into a slot of the cache, as in a page table
(Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023):

    sequence:     t0 t1 t2 t3 | t4 t5 .. ..          block_size 4, 6 tokens
    block_table:  [7, 2]                             block 7 holds tokens 0–3, block 2 tokens 4–5
    slots:        28 29 30 31 | 8 9                  slot = block × block_size + offset

>>> block_table, block_size = [7, 2], 4
>>> [block_table[token // block_size] * block_size + token % block_size for token in range(6)]
[28, 29, 30, 31, 8, 9]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from pagedkv.plugin.interface import AttentionKernels, KVStorage

PADDING_SLOT = -1
"""Value in `slot_mapping` for a token whose keys and values are not stored."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch: B sequences with T new tokens, all on the model's device. Rows with one query token lead.

    A padding row has one query token, a `seq_len` of 0 and `PADDING_SLOT`; its output is zero.
    """

    cu_seqlens_q: torch.Tensor
    """[B + 1] int32: row b's query tokens are cu_seqlens_q[b] to cu_seqlens_q[b + 1] of the flattened batch."""
    seq_lens: torch.Tensor
    """[B] int32: tokens of row b in the cache once this step's are stored. The last query token is the last of them."""
    block_table: torch.Tensor
    """[B, max_blocks] int32: entries past a row's last block are arbitrary and must not be read."""
    slot_mapping: torch.Tensor
    """[T] int64: where each new token's keys and values go; block × block_size + offset, or PADDING_SLOT."""
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    """Leading rows with exactly one query token, padding rows among them."""

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of attention that a model passes when a layer calls it."""

    scale: float
    """Factor of query × key."""
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[num_heads]: one logit a head, added to the sum of the softmax without a value."""
    alibi_slopes: torch.Tensor | None = None
    """[num_heads] float32: adds slope × (key position - query position) to the scores."""


class LayerAttention(Protocol):
    """The interface that an attention layer calls: an AttentionContext, or a stand-in that inspects a model."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Attention over the paged cache for the layers of a model in one step.

    It is an argument of the forward, never a global: two engines in one process have two contexts.
    """

    kernels: AttentionKernels
    storage: Sequence[KVStorage]
    """One for each layer."""
    metadata: AttentionMetadata

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Stores the new keys and values of a layer at their slots, then attends over the block tables.

        Args:
            layer: index of the attention layer.
            q: [num_tokens, num_heads, head_dim], last dim contiguous, read only; as k and v.
            k: [num_tokens, num_kv_heads, head_dim].
            v: [num_tokens, num_kv_heads, v_head_dim].
            options: scale, window, soft cap, sinks, slopes.

        Returns:
            [num_tokens, num_heads, v_head_dim] in the dtype of q.
        """
        storage = self.storage[layer]
        self.kernels.store(storage, k, v, self.metadata)
        return self.kernels.attend(q, storage, self.metadata, options)
