"""How many blocks a pool gets: from a memory budget, the machine, and what is taken already.

`size_pool` is what a backend calls once at warm-up, on every rank; `count_blocks` is its arithmetic, for a plan too.
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
    """Decides the number of blocks, the same one on every rank. Collective: all ranks call it, or none.

    Args:
        bytes_per_block: of all layers together, scales included.
        used_bytes: what this process holds on the device already, weights above all. Of CUDA's memory, give unused
            cached memory back first (`torch.cuda.empty_cache`), it counts as taken.
        activation_bytes: the most that one step needs beside weights and pool.
        min_num_blocks: blocks that one request of the limits takes.
        max_num_blocks: beyond which more blocks are of no use; bounds a fraction of memory, not a size that was asked
            for outright. None is no bound.

    Raises:
        CapacityError: the budget does not hold one request; raised on all ranks alike.
        ConfigError: the free memory can't be found out on this system.
    """
    num_blocks = count_blocks(
        budget,
        None if isinstance(budget, (MemoryBlocks, MemoryBytes)) else read_device_memory(device),
        bytes_per_block=bytes_per_block,
        used_bytes=used_bytes,
        activation_bytes=activation_bytes,
        max_num_blocks=max_num_blocks,
    )
    # Checked only after agreeing: a rank that raised before would leave the others waiting for it.
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
    """Blocks of one rank alone; arguments as in `size_pool`.

    Args:
        memory: needed for a budget that is a fraction of it.
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
    """The least value over all ranks of torch.distributed; the value itself where it is not initialized."""
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
