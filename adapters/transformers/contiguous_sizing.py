"""How many tokens a contiguous cache holds: memory budget and machine in, capacity out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.memory import DeviceMemory, compute_pool_bytes, read_device_memory
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBytes, ResolvedConfig


@dataclass(frozen=True, slots=True)
class ContiguousLimits:
    """What is accepted, and how much runs at once."""

    max_input_tokens: int
    max_total_tokens: int
    """Room that each row reserves."""
    max_prefill_tokens: int
    """Rows × width of one prefill; a single prompt may have more."""
    max_rows: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of requests, as asked for or else configured."""

    max_input_tokens: int
    max_total_tokens: int
    is_total_demanded: bool
    """Whether a capacity below max_total_tokens is an error; else the limit follows the capacity."""


def resolve_lengths(wanted: WarmupLimits, config: ResolvedConfig, model: ModelSpec) -> Lengths:
    """Raises CapacityError for more than the model has positions, or for a prompt that leaves no room for output."""
    max_total_tokens = wanted.max_total_tokens or config.max_total_tokens
    if max_total_tokens > model.max_position_tokens:
        raise CapacityError(
            f"max_total_tokens of {max_total_tokens} is asked for, but the model was made for "
            f"{model.max_position_tokens} tokens; lower it"
        )
    max_input_tokens = wanted.max_input_tokens or min(config.max_input_tokens, max_total_tokens - 1)
    if max_input_tokens >= max_total_tokens:
        raise CapacityError(
            f"max_input_tokens of {max_input_tokens} must be below max_total_tokens of {max_total_tokens}, which also "
            "counts the output"
        )
    return Lengths(max_input_tokens, max_total_tokens, wanted.max_total_tokens > 0)


def compute_limits(
    lengths: Lengths,
    wanted: WarmupLimits,
    config: ResolvedConfig,
    *,
    bytes_per_token: int,
    activation_bytes: int,
    memory: DeviceMemory | None = None,
    used_bytes: int | None = None,
) -> ContiguousLimits:
    """The capacity, and how many requests it holds at once when each reserves `max_total_tokens`.

    Args:
        activation_bytes: the most that one step needs beside weights and cache.
        memory: of the device; None reads what it is now.
        used_bytes: what weights take of a GPU; None reads what this process holds of it now.

    Raises:
        CapacityError: the budget does not hold one request of the limits that were asked for.
    """
    max_sequences = min(config.scheduler.max_num_sequences, wanted.max_batch_size or config.scheduler.max_num_sequences)
    budget_bytes = _budget_bytes(config, bytes_per_token, activation_bytes, memory, used_bytes)
    capacity_tokens = budget_bytes // bytes_per_token
    if not isinstance(config.cache.budget, (MemoryBlocks, MemoryBytes)):
        capacity_tokens = min(capacity_tokens, max_sequences * lengths.max_total_tokens)
    needed_tokens = lengths.max_total_tokens if lengths.is_total_demanded else 2
    if capacity_tokens < needed_tokens:
        raise CapacityError(
            f"the memory budget holds {capacity_tokens} tokens of {bytes_per_token} bytes, one request reserves "
            f"{lengths.max_total_tokens}: raise cache.memory, cache.num_blocks or cache.memory_fraction, or lower "
            "limits.max_total_tokens"
        )
    max_total_tokens = min(lengths.max_total_tokens, capacity_tokens)
    return ContiguousLimits(
        max_input_tokens=min(lengths.max_input_tokens, max_total_tokens - 1),
        max_total_tokens=max_total_tokens,
        max_prefill_tokens=wanted.max_prefill_tokens or config.scheduler.max_step_tokens,
        max_rows=min(capacity_tokens // max_total_tokens, max_sequences),
        capacity_tokens=capacity_tokens,
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
