"""From what the user asks for to engines and workloads: every engine gets the same lengths and the same KV budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.integration.benchmark.engine_process import EngineSpec
from pagedkv.integration.benchmark.engines import PeerOptions, make_backend_spec, make_peer_spec
from pagedkv.integration.benchmark.suite import Bout, RunSettings
from pagedkv.integration.benchmark.workloads import (
    ALL_AT_ONCE,
    CAPACITY_ROW_TOKENS,
    CAPACITY_ROWS,
    Arrivals,
    Shape,
    find_plain_tokens,
    find_shapes,
)
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import BACKENDS, MODELS, find_plugin
from pagedkv.plugin.resolved_config import (
    MemoryBlocks,
    MemoryBytes,
    ResolvedConfig,
    resolve_config,
    resolve_model_settings,
)

MIN_TOTAL_TOKENS = 4096
"""Longest request that engines are set up for, at least: what the contiguous backend reserves for each."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The command line, understood."""

    model: Path
    workloads: Sequence[str]
    backends: Sequence[str]
    ways: Sequence[str] = ("process",)
    peers: Sequence[str] = ()
    """NAME=PYTHON each."""
    peer_models: Mapping[str, str] = field(default_factory=dict)
    config_file: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    kv_memory: str = "4GiB"
    arrivals: Arrivals = ALL_AT_ONCE
    num_repetitions: int = 3
    seed: int = 0
    scale: float = 1.0
    timeout_s: float = 1800.0
    logs: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    bouts: Sequence[Bout]
    settings: RunSettings
    dtype: str

    @property
    def shapes(self) -> list[Shape]:
        return [shape for bout in self.bouts for shape in bout.shapes]


def make_plan(wishes: Wishes) -> Plan:
    """Finds workloads, engines and token ids. Nothing is started yet.

    Raises:
        ConfigError, PluginError: a name that is not known, a model that is too short for a workload.
    """
    shapes = find_shapes(wishes.workloads, wishes.scale)
    for backend in wishes.backends:
        find_plugin(BACKENDS, backend)
    overrides = {"cache.memory": wishes.kv_memory, **wishes.overrides, "model.path": str(wishes.model.absolute())}
    written = load_config(wishes.config_file, overrides)
    model_settings = resolve_model_settings(written)
    adapter = find_plugin(MODELS, model_settings.adapter)
    spec = adapter.describe(model_settings)
    config = resolve_config(written, spec)
    tokenizer = adapter.load_tokenizer(model_settings)
    settings = RunSettings(
        find_plain_tokens(tokenizer, spec.vocab_size, wishes.seed),
        wishes.arrivals,
        wishes.num_repetitions,
        wishes.seed,
        wishes.timeout_s,
        wishes.logs,
    )
    large = [shape for shape in shapes if not shape.needs_small_cache]
    small = [shape for shape in shapes if shape.needs_small_cache]
    bouts = []
    if large:
        bouts.append(_plan_large(wishes, overrides, large, spec, config))
    if small:
        bouts.append(_plan_small(wishes, overrides, small, spec, config))
    if not any(bout.engines for bout in bouts):
        raise ConfigError("there is no engine to run: name a --backend or a --peer")
    return Plan([bout for bout in bouts if bout.engines], settings, str(config.dtype).removeprefix("torch."))


def _plan_large(
    wishes: Wishes, overrides: Mapping[str, Any], shapes: Sequence[Shape], spec: ModelSpec, config: ResolvedConfig
) -> Bout:
    limit = _find_limit(shapes, spec, MIN_TOTAL_TOKENS)
    peer_options = PeerOptions(
        wishes.model,
        wishes.peer_models,
        str(config.dtype).removeprefix("torch."),
        _budget_bytes(spec, config),
        limit,
    )
    ours = _make_backend_specs(wishes, {"limits.max_total_tokens": limit, **overrides})
    return Bout(shapes, ours + [make_peer_spec(peer, peer_options) for peer in wishes.peers])


def _plan_small(
    wishes: Wishes, overrides: Mapping[str, Any], shapes: Sequence[Shape], spec: ModelSpec, config: ResolvedConfig
) -> Bout:
    """Our backends alone: a KV budget in bytes is no setting of every peer."""
    limit = _find_limit(shapes, spec, CAPACITY_ROW_TOKENS)
    num_blocks = CAPACITY_ROWS * -(-limit // config.cache.block_size)
    kv_bytes = num_blocks * spec.bytes_per_block(config.cache.block_size, KV_DTYPE_OF_TORCH[config.dtype])
    budget = {"cache.memory": str(kv_bytes), "cache.num_blocks": "auto", "limits.max_total_tokens": limit}
    return Bout(shapes, _make_backend_specs(wishes, {**overrides, **budget}))


def _make_backend_specs(wishes: Wishes, overrides: Mapping[str, Any]) -> list[EngineSpec]:
    return [
        make_backend_spec(backend, way, wishes.config_file, overrides)
        for way in wishes.ways
        for backend in wishes.backends
    ]


def _find_limit(shapes: Sequence[Shape], spec: ModelSpec, at_least: int) -> int:
    """The longest request that engines must take. Raises ConfigError for more than the model has positions."""
    longest = max(shapes, key=lambda shape: shape.max_total_tokens)
    if longest.max_total_tokens > spec.max_position_tokens:
        raise ConfigError(
            f"the workload {longest.name} has requests of {longest.max_total_tokens} tokens, but the model was made "
            f"for {spec.max_position_tokens}: leave it out, or make all lengths shorter with --scale"
        )
    return min(spec.max_position_tokens, max(at_least, longest.max_total_tokens))


def _budget_bytes(spec: ModelSpec, config: ResolvedConfig) -> int:
    budget = config.cache.budget
    if isinstance(budget, MemoryBytes):
        return budget.num_bytes
    if isinstance(budget, MemoryBlocks):
        return budget.num_blocks * spec.bytes_per_block(config.cache.block_size, config.cache.kv_dtype)
    raise ConfigError("a benchmark needs a KV budget of a fixed size: set --kv-memory")
