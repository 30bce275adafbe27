"""Computes the memory for keys and values with the engine's own code, and shows the formula with its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedkv.integration.measure.plan.activations import StepBytes
from pagedkv.plugin.cache.budget import count_blocks
from pagedkv.plugin.config import AUTO, Config
from pagedkv.plugin.memory import MAX_HOST_SHARE, DeviceMemory, format_bytes, read_device_memory
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBytes, ResolvedConfig

GPU_WORKSPACE_BYTES = 1 << 30
"""Memory on a GPU outside of tensors: CUDA's context, libraries' workspaces, kernels' partial results. An assumption,
not measured; --workspace changes it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One shard's memory, in bytes."""

    memory: DeviceMemory
    """Memory after the weights are loaded."""
    weight_bytes: int
    activation_bytes: int
    """As the engine counts them: 0 on a CPU, where activations use the half that the pool leaves."""
    graph_bytes: int
    workspace_bytes: int
    bytes_per_block: int
    num_blocks: int
    is_capped: bool
    """Whether memory would hold more blocks than `max_num_sequences` of the longest length need."""
    formula: str

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def find_device(config: Config, has_given_memory: bool) -> torch.device:
    """Returns the device to plan for: a GPU if memory is given, unless the config names a CPU; else this machine's."""
    name = config.model.device
    if name == AUTO:
        return torch.device("cuda" if has_given_memory or torch.cuda.is_available() else "cpu")
    return torch.device(name)


def find_memory(device: torch.device, given_bytes: int | None) -> DeviceMemory:
    """Memory of a device before a model is loaded: as given, or as it is now."""
    if given_bytes is None:
        return read_device_memory(device)
    return DeviceMemory(given_bytes, given_bytes, is_host=device.type != "cuda")


def make_budget(
    config: ResolvedConfig, spec: ModelSpec, step: StepBytes, memory: DeviceMemory, weights: int, workspace: int
) -> Budget:
    """Computes the budget of a paged cache.

    Args:
        spec: one shard's part of the model.
        memory: before the model is loaded.
        weights: bytes, as the workspace.
    """
    memory = replace(memory, free_bytes=max(0, memory.free_bytes - weights - workspace))
    block_size = config.cache.block_size
    bytes_per_block = spec.bytes_per_block(block_size, config.cache.kv_dtype)
    activation_bytes, graph_bytes = (0, 0) if memory.is_host else (step.activation_bytes, step.graph_bytes)

    def count(max_num_blocks: int | None) -> int:
        return count_blocks(
            config.cache.budget,
            memory,
            bytes_per_block=bytes_per_block,
            used_bytes=weights,
            activation_bytes=activation_bytes + graph_bytes,
            max_num_blocks=max_num_blocks,
        )

    most_useful = -(-config.max_total_tokens // block_size) * config.scheduler.max_num_sequences
    num_blocks = count(most_useful)
    return Budget(
        memory=memory,
        weight_bytes=weights,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        workspace_bytes=workspace,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        is_capped=num_blocks < count(None),
        formula=_formula(config, memory, weights, workspace, activation_bytes, graph_bytes),
    )


def _formula(
    config: ResolvedConfig, memory: DeviceMemory, weights: int, workspace: int, activations: int, graphs: int
) -> str:
    budget = config.cache.budget
    if isinstance(budget, MemoryBlocks):
        return f"{budget.num_blocks} blocks, as the config says"
    if isinstance(budget, MemoryBytes):
        return f"{format_bytes(budget.num_bytes)}, as the config says"
    if memory.is_host:
        free = format_bytes(memory.free_bytes)
        return f"{free} free beside the weights × {MAX_HOST_SHARE:g} for others × {budget.fraction:g}"
    total, fraction = format_bytes(memory.total_bytes), f"{budget.fraction:g}"
    used = f"{format_bytes(weights)} weights"
    left = f"min({total} × {fraction} − {used}, {format_bytes(memory.free_bytes)} free beside weights and workspace)"
    return f"{left} − {format_bytes(activations)} activations − {format_bytes(graphs)} graphs"
