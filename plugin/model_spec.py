"""Facts about a model that are known before its weights are loaded, for the budget, the planner and the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedkv.plugin.kv_dtypes import KVCacheSpec, KVDtype


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer on one shard. Query head i reads KV head i // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head dimension of queries and keys."""
    v_head_dim: int
    """Head dimension of values and of the output."""
    sliding_window: int | None = None
    """A query sees itself and the `sliding_window - 1` tokens before it; None sees all."""
    softcap: float | None = None
    """Scores become softcap × tanh(score / softcap)."""
    has_sinks: bool = False
    has_alibi: bool = False
    features: frozenset[str] = frozenset()
    """Names of what kernels must understand to be right here, beyond the fields above (`pagedkv.plugin.features`)."""

    def cache_spec(self, block_size: int, kv_dtype: KVDtype) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_dim, self.v_head_dim, block_size, kv_dtype)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about one shard of a checkpoint."""

    architecture: str
    dtype: torch.dtype
    """Dtype of the weights in the checkpoint."""
    layers: tuple[AttentionSpec, ...]
    """The attention layers, in order; their number in the tuple is the layer index everywhere."""
    vocab_size: int
    hidden_size: int
    max_position_tokens: int
    """Positions the model was made for: prompt and output together."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    num_parameters: int | None = None
    """Parameters of the whole model; None if the configuration does not determine them."""
    has_qk_norm: bool = False
    kv_scales_dtype: str | None = None
    """Name of the KV dtype for which the checkpoint contains scales of keys and values; None if it contains none."""

    def bytes_per_block(self, block_size: int, kv_dtype: KVDtype) -> int:
        """KV bytes of one block over all layers."""
        return sum(layer.cache_spec(block_size, kv_dtype).bytes_per_block for layer in self.layers)

    def with_dtype(self, dtype: torch.dtype) -> ModelSpec:
        return replace(self, dtype=dtype)
