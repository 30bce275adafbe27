"""Makes engines and workloads from the user's options. Every engine gets the same lengths and the same KV budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.integration.measure.benchmark.engine_process import EngineSpec
from pagedkv.integration.measure.benchmark.engines import PeerOptions, make_backend_spec, make_peer_spec
from pagedkv.integration.measure.benchmark.suite import Round, RunSettings
from pagedkv.integration.measure.benchmark.workloads import (
    ALL_AT_ONCE,
    CAPACITY_ROW_TOKENS,
    CAPACITY_ROWS,
    Arrivals,
    Shape,
    draw_plain_tokens,
    select_shapes,
)
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import BACKENDS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import (
    MemoryBlocks,
    MemoryBytes,
    ResolvedConfig,
    resolve_config,
    resolve_model_settings,
)

MIN_TOTAL_TOKENS = 4096
"""Least length of the longest request for which engines are set up; the contiguous backend reserves it for each."""


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """The options of the command line."""

    model: Path
    workloads: Sequence[str]
    backends: Sequence[str]
    transports: Sequence[str] = ("process",)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the config, by name and by dotted key. Each backend runs as configured, and with each of these."""
    peers: Sequence[str] = ()
    """Peers, each as NAME=PYTHON."""
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
class Experiment:
    rounds: Sequence[Round]
    settings: RunSettings
    dtype: str

    @property
    def shapes(self) -> list[Shape]:
        return [shape for round_ in self.rounds for shape in round_.shapes]


def plan_experiment(options: BenchmarkOptions) -> Experiment:
    """Selects workloads, engines and token ids. Starts nothing.

    Raises:
        ConfigError, PluginError: a name is unknown, or a workload is too long for the model.
    """
    shapes = select_shapes(options.workloads, options.scale)
    for backend in options.backends:
        load_plugin(BACKENDS, backend)
    overrides = {"cache.memory": options.kv_memory, **options.overrides, "model.path": str(options.model.absolute())}
    written = load_config(options.config_file, overrides)
    model_settings = resolve_model_settings(written)
    adapter = load_plugin(MODELS, model_settings.adapter)
    spec = adapter.describe(model_settings)
    config = resolve_config(written, spec)
    tokenizer = adapter.load_tokenizer(model_settings)
    settings = RunSettings(
        draw_plain_tokens(tokenizer, spec.vocab_size, options.seed),
        options.arrivals,
        options.num_repetitions,
        options.seed,
        options.timeout_s,
        options.logs,
    )
    large = [shape for shape in shapes if not shape.needs_small_cache]
    small = [shape for shape in shapes if shape.needs_small_cache]
    rounds = []
    if large:
        rounds.append(_plan_large(options, overrides, large, spec, config))
    if small:
        rounds.append(_plan_small(options, overrides, small, spec, config))
    if not any(round_.engines for round_ in rounds):
        raise ConfigError("there is no engine to run: name a --backend or a --peer")
    return Experiment(
        [round_ for round_ in rounds if round_.engines], settings, str(config.dtype).removeprefix("torch.")
    )


def _plan_large(
    options: BenchmarkOptions,
    overrides: Mapping[str, Any],
    shapes: Sequence[Shape],
    spec: ModelSpec,
    config: ResolvedConfig,
) -> Round:
    limit = _find_limit(shapes, spec, MIN_TOTAL_TOKENS)
    peer_options = PeerOptions(
        options.model,
        options.peer_models,
        str(config.dtype).removeprefix("torch."),
        _budget_bytes(spec, config),
        limit,
    )
    ours = _make_backend_specs(options, {"limits.max_total_tokens": limit, **overrides})
    return Round(shapes, ours + [make_peer_spec(peer, peer_options) for peer in options.peers])


def _plan_small(
    options: BenchmarkOptions,
    overrides: Mapping[str, Any],
    shapes: Sequence[Shape],
    spec: ModelSpec,
    config: ResolvedConfig,
) -> Round:
    """Plans the round with a small cache. Only for our backends: not every peer has a KV budget in bytes."""
    limit = _find_limit(shapes, spec, CAPACITY_ROW_TOKENS)
    num_blocks = CAPACITY_ROWS * -(-limit // config.cache.block_size)
    kv_bytes = num_blocks * spec.bytes_per_block(config.cache.block_size, KV_DTYPE_OF_TORCH[config.dtype])
    budget = {"cache.memory": str(kv_bytes), "cache.num_blocks": "auto", "limits.max_total_tokens": limit}
    return Round(shapes, _make_backend_specs(options, {**overrides, **budget}))


def _make_backend_specs(options: BenchmarkOptions, overrides: Mapping[str, Any]) -> list[EngineSpec]:
    variants = {"": {}, **options.variants}
    for values in variants.values():
        load_config(options.config_file, {**overrides, **values})  # a wrong one is told before the first engine starts
    specs = [
        make_backend_spec(backend, transport, options.config_file, {**overrides, **values}, variant)
        for transport in options.transports
        for backend in options.backends
        for variant, values in variants.items()
    ]
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise ConfigError(f"two engines would be named {name}: give the --variant another name")
    return specs


def _find_limit(shapes: Sequence[Shape], spec: ModelSpec, at_least: int) -> int:
    """Returns the longest request that engines must accept. Raises ConfigError beyond the model's positions."""
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
