"""Computes the number of blocks of a pool from the memory budget, the machine, and the memory in use.

A backend calls `size_pool` once at warm-up, on every rank. `count_blocks` is the arithmetic, also for `pagedkv plan`.
"""

from __future__ import annotations

import torch
import torch.distributed

from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.memory import DeviceMemory, compute_pool_bytes, format_bytes, read_device_memory
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBudget, MemoryBytes


def size_pool(
    budget: MemoryBudget,
    device: torch.device,
    *,
    bytes_per_block: int,
    used_bytes: int,
    activation_bytes: int,
    min_num_blocks: int,
    max_num_blocks: int | None = None,
) -> int:
    """Decides the number of blocks, the same on every rank. Collective: all ranks must call it.

    Args:
        bytes_per_block: of all layers together, scales included.
        used_bytes: memory that this process already holds on the device, mainly weights. On CUDA, call
            `torch.cuda.empty_cache` first: unused cached memory counts as used.
        activation_bytes: the most that one step needs in addition to weights and pool.
        min_num_blocks: blocks that the longest request of the limits needs.
        max_num_blocks: limit above which more blocks are useless. Applies to a budget that is a fraction of memory, not
            to an explicit size. None is no limit.

    Raises:
        CapacityError: one request does not fit into the budget; raised on all ranks.
        ConfigError: this system does not report its free memory.
    """
    num_blocks = count_blocks(
        budget,
        None if isinstance(budget, (MemoryBlocks, MemoryBytes)) else read_device_memory(device),
        bytes_per_block=bytes_per_block,
        used_bytes=used_bytes,
        activation_bytes=activation_bytes,
        max_num_blocks=max_num_blocks,
    )
    # Check only after all ranks agree: if a rank raised before, the others would wait for it.
    num_blocks = agree_on_minimum(num_blocks)
    if num_blocks < min_num_blocks:
        raise CapacityError(
            _explain_shortage(budget, num_blocks, min_num_blocks, bytes_per_block, used_bytes, activation_bytes)
        )
    return num_blocks


def count_blocks(
    budget: MemoryBudget,
    memory: DeviceMemory | None,
    *,
    bytes_per_block: int,
    used_bytes: int,
    activation_bytes: int,
    max_num_blocks: int | None = None,
) -> int:
    """Computes the number of blocks of one rank. Arguments are those of `size_pool`.

    Args:
        memory: of the device; needed for a budget that is a fraction of it.
    """
    if isinstance(budget, MemoryBlocks):
        return budget.num_blocks
    if isinstance(budget, MemoryBytes):
        return budget.num_bytes // bytes_per_block
    assert memory is not None
    pool_bytes = compute_pool_bytes(budget.fraction, memory, used_bytes=used_bytes, activation_bytes=activation_bytes)
    num_blocks = pool_bytes // bytes_per_block
    return num_blocks if max_num_blocks is None else min(num_blocks, max_num_blocks)


def agree_on_minimum(value: int) -> int:
    """Returns the least value over all ranks of torch.distributed, or the value itself if it is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    has_gloo = "gloo" in torch.distributed.get_backend_config()
    device = torch.device("cpu") if has_gloo else torch.device("cuda", torch.cuda.current_device())
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
    return int(tensor.item())


def _explain_shortage(
    budget: MemoryBudget,
    num_blocks: int,
    min_num_blocks: int,
    bytes_per_block: int,
    used_bytes: int,
    activation_bytes: int,
) -> str:
    needed = f"{min_num_blocks} blocks ({format_bytes(min_num_blocks * bytes_per_block)})"
    found = f"the pool would have {num_blocks} blocks of {format_bytes(bytes_per_block)}"
    if isinstance(budget, MemoryBlocks):
        remedy = f"raise cache.num_blocks (now {budget.num_blocks})"
    elif isinstance(budget, MemoryBytes):
        remedy = f"raise cache.memory (now {format_bytes(budget.num_bytes)})"
    else:
        found += f", beside {format_bytes(used_bytes)} in use and {format_bytes(activation_bytes)} for activations"
        remedy = f"raise cache.memory_fraction (now {budget.fraction:g}) or free memory"
    return f"one request of the limits takes {needed}, but {found}: {remedy}, or lower limits.max_total_tokens"
