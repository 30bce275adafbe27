"""A plan: everything that `pagedkv plan` shows, computed from a written config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pagedkv.adapters.transformers.sharding import describe_shard
from pagedkv.integration.measure.plan.activations import StepBytes, plan_step_bytes
from pagedkv.integration.measure.plan.budget import GPU_WORKSPACE_BYTES, Budget, find_device, find_memory, make_budget
from pagedkv.integration.measure.plan.capacities import CacheCapacity, contiguous_capacity, paged_capacity
from pagedkv.integration.measure.plan.layer_kinds import LayerKind, find_layer_kinds
from pagedkv.integration.measure.plan.model_facts import ModelFacts, read_model
from pagedkv.integration.measure.plan.traffic import Traffic
from pagedkv.integration.measure.plan.weights import count_decoder_bytes, count_weight_bytes
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import ConfigError, PagedKVError, UnsupportedError
from pagedkv.plugin.features import find_layer_faults
from pagedkv.plugin.kv_dtypes import KVDtype, find_kv_dtype, known_kv_dtypes
from pagedkv.plugin.memory import DeviceMemory
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import KERNELS, create_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config

MAX_SHARDS = 64


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Inputs of a plan in addition to the config."""

    traffic: Traffic
    device_memory_bytes: int | None = None
    """Memory of one device; None is this machine's."""
    memory: DeviceMemory | None = None
    """This machine's memory before the model is loaded; None reads it now."""
    num_devices: int = 1
    """Number of devices over which one model is split."""
    workspace_bytes: int | None = None
    """None is GPU_WORKSPACE_BYTES on a GPU, 0 on a CPU."""
    weight_bytes: int | None = None
    """Bytes of one shard's weights; None counts them."""
    concurrency: int = 0
    """Number of requests wanted at once; 0 if none is given."""


@dataclass(frozen=True, slots=True)
class DtypeChange:
    """What another KV dtype would change."""

    kv_dtype: str
    bytes_per_token: float
    num_blocks: int
    holding: CacheCapacity
    refusal: str
    """Why it can't be served on this machine; empty if it can, or if the device is not here to check."""


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """Devices that hold the wanted requests: replicas of a model split over shards, one device each."""

    num_shards: int
    num_replicas: int
    requests_per_replica: int

    @property
    def num_devices(self) -> int:
        return self.num_shards * self.num_replicas


class MemoryPlan:
    """The plan of a model on a device. Raises the errors of the engine's start if no plan can be made."""

    def __init__(self, written: Config, request: PlanRequest) -> None:
        """Reads the model's configuration and the available memory.

        Raises:
            ConfigError: no such model, lengths beyond the limits, weights that can't be counted.
            UnsupportedError: no attention layers, or heads that can't be split over so many devices.
        """
        self.request = request
        self.facts: ModelFacts = read_model(written)
        self.config: ResolvedConfig = resolve_config(
            written, self.facts.spec, find_device(written, request.device_memory_bytes is not None)
        )
        if request.traffic.total_tokens > self.config.max_total_tokens:
            raise ConfigError(
                f"{request.traffic.prompt_tokens} prompt and {request.traffic.output_tokens} output tokens exceed the "
                f"limit of {self.config.max_total_tokens} tokens together"
            )
        self._memory = request.memory or find_memory(self.config.device, request.device_memory_bytes)
        self.budget: Budget = self.budget_of(request.num_devices, self.config)
        self.holding: CacheCapacity = paged_capacity(self.budget, self.config, request.traffic)

    @property
    def is_device_here(self) -> bool:
        return self.config.device.type != "cuda" or torch.cuda.is_available()

    @cached_property
    def step(self) -> StepBytes:
        return plan_step_bytes(self.facts, self.config)

    @cached_property
    def shard(self) -> ModelSpec:
        return self._shard(self.request.num_devices)

    @cached_property
    def layer_kinds(self) -> list[LayerKind]:
        """Kinds of layers of one shard."""
        cache = self.config.cache
        return find_layer_kinds(self.shard, cache.block_size, cache.kv_dtype, self.facts.latent)

    @cached_property
    def contiguous(self) -> CacheCapacity:
        return contiguous_capacity(self.budget, self.config, self.shard)

    @property
    def bytes_per_token(self) -> float:
        """KV bytes per token of one shard, over all layers."""
        return self.budget.bytes_per_block / self.config.cache.block_size

    def refusal_of(self, kv_dtype: KVDtype) -> str:
        """Returns why the kernels can't serve the model with a KV dtype on this machine.

        Empty if they can, or if the device is not here to check."""
        if not self.is_device_here:
            return ""
        try:
            kernels = create_plugin(KERNELS, self.config.kernels, self.config.plugins, self.config.device)
        except PagedKVError as error:
            return str(error)
        reasons: dict[str, None] = {}
        for layer in dict.fromkeys(self.shard.layers):
            spec = layer.cache_spec(self.config.cache.block_size, kv_dtype)
            reasons.update(dict.fromkeys(find_layer_faults(kernels, layer, spec, self.config.dtype)))
        return "; ".join(reasons)

    @cached_property
    def changes(self) -> list[DtypeChange]:
        """Changes by KV dtype, largest first."""
        changes = [self._change(find_kv_dtype(name)) for name in known_kv_dtypes()]
        return sorted(changes, key=lambda change: (-change.bytes_per_token, change.kv_dtype))

    @cached_property
    def device_options(self) -> list[DeviceOption]:
        """Options for the wanted number of requests, all at their ends; fewest devices first."""
        wanted = self.request.concurrency
        scheduler = replace(
            self.config.scheduler, max_num_sequences=max(wanted, self.config.scheduler.max_num_sequences)
        )
        config = replace(self.config, scheduler=scheduler)
        options = []
        for num_shards in range(1, MAX_SHARDS + 1):
            try:
                budget = self.budget_of(num_shards, config)
            except UnsupportedError:
                continue
            held = paged_capacity(budget, config, self.request.traffic).worst_requests
            if held:
                options.append(DeviceOption(num_shards, -(-wanted // held), held))
            if held >= wanted:
                break
        return sorted(options, key=lambda option: (option.num_devices, option.num_shards))

    def budget_of(self, num_shards: int, config: ResolvedConfig) -> Budget:
        """Computes a shard's budget. Raises UnsupportedError if the model can't be split over so many shards."""
        weights = self._weights(num_shards)
        is_gpu = config.device.type == "cuda"
        workspace = self.request.workspace_bytes
        if workspace is None:
            workspace = GPU_WORKSPACE_BYTES if is_gpu else 0
        step = self.step if is_gpu else StepBytes(0, 0, is_estimate=False)
        return make_budget(config, self._shard(num_shards), step, self._memory, weights, workspace)

    def _weights(self, num_shards: int) -> int:
        if self.request.weight_bytes is not None:
            return self.request.weight_bytes
        counted = count_weight_bytes(self.facts, self.config.dtype, num_shards)
        if counted is None:
            raise ConfigError(
                f"the weights of {self.facts.spec.architecture} can't be counted from its config.json "
                f"({self.facts.refusal}); give them with --weights"
            )
        return counted + count_decoder_bytes(self.facts, self.config, num_shards)

    def _shard(self, num_shards: int) -> ModelSpec:
        spec = self.facts.spec.with_dtype(self.config.dtype)
        if num_shards == 1:
            return spec
        if self.facts.modules is None:
            raise UnsupportedError(f"how {spec.architecture} is split over devices is unknown; plan for one")
        return describe_shard(spec, self.facts.modules, num_shards)

    def _change(self, kv_dtype: KVDtype) -> DtypeChange:
        config = replace(self.config, cache=replace(self.config.cache, kv_dtype=kv_dtype))
        budget = self.budget_of(self.request.num_devices, config)
        return DtypeChange(
            kv_dtype.name,
            budget.bytes_per_block / config.cache.block_size,
            budget.num_blocks,
            paged_capacity(budget, config, self.request.traffic),
            self.refusal_of(kv_dtype),
        )
