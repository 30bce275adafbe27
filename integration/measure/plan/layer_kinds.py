"""Computes bytes per token by kind of attention layer, with the formula and its numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from pagedkv.integration.measure.plan.model_facts import LatentKV
from pagedkv.plugin.kv_dtypes import KVDtype
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with the same size of keys and values."""

    name: str
    num_layers: int
    sliding_window: int | None
    bytes_per_token: float
    """Bytes per token of all these layers on one shard, including scales and padding inside blocks."""
    formula: str
    latent_bytes_per_token: float | None
    """Bytes per token of a cache of the latent instead; only for latent attention."""


def find_layer_kinds(
    spec: ModelSpec, block_size: int, kv_dtype: KVDtype, latent: LatentKV | None = None
) -> list[LayerKind]:
    """Groups layers into kinds, in the order in which they first appear."""
    plain = [replace(layer, softcap=None, has_sinks=False, has_alibi=False) for layer in spec.layers]
    return [
        LayerKind(
            name=_name(layer, latent),
            num_layers=count,
            sliding_window=layer.sliding_window,
            bytes_per_token=count * layer.cache_spec(block_size, kv_dtype).bytes_per_token,
            formula=_formula(layer, count, block_size, kv_dtype),
            latent_bytes_per_token=_latent_bytes(latent, count, block_size, kv_dtype),
        )
        for layer, count in Counter(plain).items()
    ]


def _name(layer: AttentionSpec, latent: LatentKV | None) -> str:
    if latent is not None:
        return "MLA, expanded to every head"
    heads = {layer.num_heads: "MHA", 1: "MQA"}.get(layer.num_kv_heads, "GQA")
    window = f", sliding window {layer.sliding_window}" if layer.sliding_window else ""
    return f"{heads} {layer.num_heads}/{layer.num_kv_heads}{window}"


def _formula(layer: AttentionSpec, count: int, block_size: int, kv_dtype: KVDtype) -> str:
    elements = (layer.head_dim + layer.v_head_dim) * kv_dtype.bits / 8
    spec = layer.cache_spec(block_size, kv_dtype)
    scales = spec.bytes_per_token / layer.num_kv_heads - elements
    per_head = f"({layer.head_dim} + {layer.v_head_dim}) × {kv_dtype.bits / 8:g} B"
    if scales:
        per_head = f"({per_head} + {scales:g} B of scales)"
    return f"{count} layers × {layer.num_kv_heads} KV heads × {per_head} = {count * spec.bytes_per_token:,.0f} B"


def _latent_bytes(latent: LatentKV | None, count: int, block_size: int, kv_dtype: KVDtype) -> float | None:
    if latent is None:
        return None
    return count * kv_dtype.key_bytes(latent.rank + latent.rope_dim, block_size) / block_size
