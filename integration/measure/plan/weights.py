"""Counts the bytes of a model's weights on one shard, over modules on the meta device."""

from __future__ import annotations

import torch

from pagedkv.adapters.transformers.fused_decoder import count_table_bytes
from pagedkv.adapters.transformers.paged_model import OFF
from pagedkv.adapters.transformers.sharding import count_shard_parameters
from pagedkv.integration.measure.plan.model_facts import ModelFacts
from pagedkv.plugin.resolved_config import ResolvedConfig


def count_weight_bytes(facts: ModelFacts, dtype: torch.dtype, num_shards: int) -> int | None:
    """Bytes of parameters, shared ones once, and buffers; None if no model can be made from the configuration.

    A quantized checkpoint's projections count at its bits, without their scales.
    """
    modules = facts.modules
    if modules is None:
        return None
    counts = count_shard_parameters(modules, num_shards, facts.spec.layers[0].num_kv_heads)
    num_bits = sum(count * _bits(name, facts, dtype) for name, count in counts.items())
    return num_bits // 8 + sum(buffer.nbytes for buffer in modules.buffers())


def count_decoder_bytes(facts: ModelFacts, config: ResolvedConfig, num_shards: int) -> int:
    """Bytes that decoder kernels keep in addition to the weights; 0 if the model runs through its modules."""
    runs_fused = config.backend == "paged" and config.model.decoder != OFF and num_shards == 1
    if not runs_fused or facts.refusal or facts.modules is None:
        return 0
    return count_table_bytes(facts.modules, facts.spec)


def _bits(name: str, facts: ModelFacts, dtype: torch.dtype) -> int:
    is_projection = "proj" in name and not name.endswith("bias")
    return facts.weight_bits if facts.weight_bits and is_projection else 8 * dtype.itemsize
