"""Computes how many tokens and requests a budget holds, paged and contiguous."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.adapters.transformers.contiguous_sizing import compute_capacity
from pagedkv.integration.measure.plan.budget import Budget
from pagedkv.integration.measure.plan.traffic import Traffic
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.limits import resolve_limits
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Requests that memory holds at once. The scheduler runs at most `scheduler.max_num_sequences` of them."""

    num_tokens: int
    mean_requests: int
    """Requests of the assumed lengths, at random positions in their answers."""
    worst_requests: int
    """Requests of the assumed lengths, all at their ends: none is ever preempted."""
    longest_requests: int
    """Requests of `limits.max_total_tokens`, all at their ends."""


def paged_capacity(budget: Budget, config: ResolvedConfig, traffic: Traffic) -> CacheCapacity:
    block_size = config.cache.block_size
    longest = Traffic(config.max_total_tokens - 1, 1)
    return CacheCapacity(
        num_tokens=budget.num_blocks * block_size,
        mean_requests=int(budget.num_blocks / traffic.mean_blocks(block_size)),
        worst_requests=budget.num_blocks // traffic.blocks_at_end(block_size),
        longest_requests=budget.num_blocks // longest.blocks_at_end(block_size),
    )


def contiguous_bytes_per_token(config: ResolvedConfig, spec: ModelSpec) -> int:
    """Bytes per token in the model's own dtype, the only one of the contiguous backend."""
    return spec.bytes_per_block(1, KV_DTYPE_OF_TORCH[config.dtype])


def contiguous_capacity(budget: Budget, config: ResolvedConfig, spec: ModelSpec) -> CacheCapacity:
    """Capacity of the contiguous backend in the same memory. Each request reserves the longest length."""
    bytes_per_token = contiguous_bytes_per_token(config, spec)
    try:
        capacity = compute_capacity(
            resolve_limits(WarmupLimits(), config, spec, can_chunk_prefill=False),
            config,
            bytes_per_token=bytes_per_token,
            activation_bytes=budget.activation_bytes,
            memory=budget.memory,
            used_bytes=budget.weight_bytes,
        )
    except CapacityError:
        return CacheCapacity(0, 0, 0, 0)
    return CacheCapacity(capacity.num_tokens, capacity.max_rows, capacity.max_rows, capacity.max_rows)
