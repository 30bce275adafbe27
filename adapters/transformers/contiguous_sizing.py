"""Computes how many tokens a contiguous cache holds, from the memory budget and the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.plugin.limits import ResolvedLimits
from pagedkv.plugin.memory import DeviceMemory, compute_pool_bytes, read_device_memory
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBytes, ResolvedConfig


@dataclass(frozen=True, slots=True)
class ContiguousCapacity:
    """What the cache holds."""

    limits: ResolvedLimits
    """Each row reserves max_total_tokens; a single prompt may have more than max_prefill_tokens."""
    max_rows: int
    """Requests that run at once."""
    num_tokens: int


def compute_capacity(
    limits: ResolvedLimits,
    config: ResolvedConfig,
    *,
    bytes_per_token: int,
    activation_bytes: int,
    memory: DeviceMemory | None = None,
    used_bytes: int | None = None,
) -> ContiguousCapacity:
    """The capacity, and how many requests it holds at once when each reserves `max_total_tokens`.

    Args:
        limits: before the cache is sized.
        activation_bytes: the most that one step needs beside weights and cache.
        memory: of the device; None reads what it is now.
        used_bytes: what weights take of a GPU; None reads what this process holds of it now.

    Raises:
        CapacityError: the budget does not hold one request of the limits that were asked for.
    """
    num_tokens = _budget_bytes(config, bytes_per_token, activation_bytes, memory, used_bytes) // bytes_per_token
    if not isinstance(config.cache.budget, (MemoryBlocks, MemoryBytes)):
        num_tokens = min(num_tokens, limits.max_num_sequences * limits.max_total_tokens)
    fitting = limits.fit(num_tokens)
    return ContiguousCapacity(
        limits=fitting,
        max_rows=min(num_tokens // fitting.max_total_tokens, limits.max_num_sequences),
        num_tokens=num_tokens,
    )


def _budget_bytes(
    config: ResolvedConfig,
    bytes_per_token: int,
    activation_bytes: int,
    memory: DeviceMemory | None,
    used_bytes: int | None,
) -> int:
    budget = config.cache.budget
    if isinstance(budget, MemoryBlocks):
        return budget.num_blocks * config.cache.block_size * bytes_per_token
    if isinstance(budget, MemoryBytes):
        return budget.num_bytes
    if used_bytes is None:
        used_bytes = torch.cuda.memory_reserved(config.device) if config.device.type == "cuda" else 0
    return compute_pool_bytes(
        budget.fraction,
        memory or read_device_memory(config.device),
        used_bytes=used_bytes,
        activation_bytes=activation_bytes,
    )
