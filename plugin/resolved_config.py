"""The resolved configuration, made from the written one and the model: every "auto" is replaced by a value.

The written and the resolved configuration are two types, so that a type checker proves that the engine never reads an
unresolved value.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from pagedkv.plugin.config import AUTO, CacheSection, Config, GraphsSection, LimitsSection, PluginTables
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVDtype, find_kv_dtype, find_static_variant
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.threads import choose_threads

logger = logging.getLogger(__name__)

DEFAULT_GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str
    adapter: str
    revision: str
    """Revision of a model on the hub; empty is the default one."""
    trust_remote_code: bool
    allow_pickle: bool
    decoder: str = "auto"
    """Name of a plugin; "off" uses no decoder kernels."""


@dataclass(frozen=True, slots=True)
class MemoryFraction:
    """Pool budget: a fraction of the device's memory, less weights and activations."""

    fraction: float


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Pool budget in bytes."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBlocks:
    """Pool budget in blocks."""

    num_blocks: int


MemoryBudget = MemoryFraction | MemoryBytes | MemoryBlocks


@dataclass(frozen=True, slots=True)
class CacheSettings:
    manager: str
    block_size: int
    kv_dtype: KVDtype
    has_prefix_cache: bool
    budget: MemoryBudget
    overcommit: float
    kv_scales: str = ""
    """File of static scales; empty if there is none, or the checkpoint contains them."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    name: str
    max_step_tokens: int
    max_num_sequences: int
    block_size: int
    max_gap_s: float = 0.0
    """Longest time between two tokens of a running stream, in seconds; 0 is no limit."""
    short_prompt_share: float = 0.5
    """Most of a step that a long prompt leaves to short ones behind it; 0 is strictly first come, first served."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The configuration without any "auto" or None. Only `resolve_config` makes it."""

    backend: str
    model: ModelSettings
    dtype: torch.dtype
    device: torch.device
    cache: CacheSettings
    scheduler: SchedulerSettings
    kernels: str
    """Name of a plugin. The plugin `auto` picks by device when it is created."""
    graph_batch_sizes: tuple[int, ...]
    """Batch sizes of CUDA graphs, ascending; empty is off."""
    max_input_tokens: int
    max_total_tokens: int
    num_threads: int
    """Threads that compute on the CPU."""
    plugins: PluginTables = field(default_factory=dict)
    """The tables [plugins.NAME], as written. `create_plugin` of the registry reads them with the plugin's own model."""


def resolve_model_settings(config: Config) -> ModelSettings:
    """Returns the settings that describe the model. Raises ConfigError if no model is named."""
    section = config.model
    if not section.path:
        raise ConfigError("no model is named: give its directory (model.path)")
    return ModelSettings(
        section.path,
        section.adapter,
        section.revision,
        section.trust_remote_code,
        section.allow_pickle,
        section.decoder,
    )


def resolve_config(
    config: Config, model: ModelSpec, device: torch.device | None = None, num_threads: int | None = None
) -> ResolvedConfig:
    """Replaces every "auto" by a value, from the model and the machine.

    Args:
        device: device to plan for, even if this machine does not have it; None is the one that the config names.
        num_threads: threads that compute on the CPU, of this process; None chooses for a process without others.

    Raises:
        ConfigError: the device does not exist here, limits exceed the model's positions or contradict each other, or
            a file of scales is set for a KV dtype that uses none.
    """
    device = device or _resolve_device(config.model.device)
    dtype = _resolve_dtype(config.model.dtype, model.dtype, device)
    max_total_tokens, max_input_tokens = _resolve_limits(config.limits, model)
    return ResolvedConfig(
        backend=config.backend,
        model=resolve_model_settings(config),
        dtype=dtype,
        device=device,
        cache=_resolve_cache(config.cache, dtype, model),
        scheduler=SchedulerSettings(
            config.scheduler.name,
            config.scheduler.max_step_tokens,
            config.scheduler.max_num_sequences,
            config.cache.block_size,
            config.scheduler.max_gap_ms / 1000,
            config.scheduler.short_prompt_share,
        ),
        kernels=config.kernels.name,
        graph_batch_sizes=_resolve_graphs(config.graphs, config.scheduler.max_num_sequences, device),
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        num_threads=num_threads or choose_threads(config.model.threads).num_threads,
        plugins=config.plugins,
    )


def _resolve_limits(limits: LimitsSection, model: ModelSpec) -> tuple[int, int]:
    max_positions = model.max_position_tokens
    max_total = max_positions if limits.max_total_tokens == AUTO else limits.max_total_tokens
    if max_total > max_positions:
        raise ConfigError(f"limits.max_total_tokens is {max_total}; the model was made for {max_positions} tokens")
    max_input = max_total - 1 if limits.max_input_tokens == AUTO else limits.max_input_tokens
    if max_input >= max_total:
        raise ConfigError(
            f"limits.max_input_tokens ({max_input}) must be below limits.max_total_tokens ({max_total}), "
            "which also counts the output"
        )
    return max_total, max_input


def _resolve_device(name: str) -> torch.device:
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device: {error}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs here")
    return device


def _resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if name != AUTO:
        return TORCH_DTYPES[name]
    if device.type != "cpu":
        return checkpoint
    # Without 16-bit instructions torch converts every operand of a product: slower than float32, and less exact.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    if checkpoint == torch.float16:
        logger.info(
            "the weights are float16, for which CPUs have no fast products: served in bfloat16; model.dtype (--dtype) "
            "float16 or float32 keeps their precision, at a fraction of the speed"
        )
        return torch.bfloat16
    return checkpoint


def _resolve_graphs(section: GraphsSection, max_num_sequences: int, device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return ()
    sizes = DEFAULT_GRAPH_BATCH_SIZES if section.batch_sizes == AUTO else section.batch_sizes
    return tuple(sorted({size for size in sizes if size <= max_num_sequences}))


def _resolve_cache(section: CacheSection, dtype: torch.dtype, model: ModelSpec) -> CacheSettings:
    budget: MemoryBudget = MemoryFraction(section.memory_fraction)
    if section.num_blocks != AUTO:
        budget = MemoryBlocks(section.num_blocks)
    elif section.memory != AUTO:
        budget = MemoryBytes(int(section.memory))
    return CacheSettings(
        section.manager,
        section.block_size,
        _resolve_kv_dtype(section, dtype, model),
        section.prefix_caching,
        budget,
        section.overcommit,
        section.kv_scales,
    )


def _resolve_kv_dtype(section: CacheSection, dtype: torch.dtype, model: ModelSpec) -> KVDtype:
    kv_dtype = KV_DTYPE_OF_TORCH[dtype] if section.kv_dtype == AUTO else find_kv_dtype(section.kv_dtype)
    if section.kv_scales or kv_dtype.name == model.kv_scales_dtype:
        return find_static_variant(kv_dtype)
    return kv_dtype
