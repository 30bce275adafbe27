"""The paged backend: schedules, executes and commits steps with the plugins that the config names."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.plugin.backend.agreement import StepAgreement
from pagedkv.plugin.backend.executor import StepExecutor
from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.backend.pacing import StepPacer
from pagedkv.plugin.backend.profile import measure_activation_bytes
from pagedkv.plugin.backend.stats import NO_CACHE, NO_SCHEDULER, make_stats
from pagedkv.plugin.cache.budget import agree_on_minimum, size_pool
from pagedkv.plugin.distributed import ShardInfo, joined_group
from pagedkv.plugin.errors import (
    CapacityError,
    IntegrityError,
    ShardError,
    StepError,
    UnavailableError,
    UnsupportedError,
)
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion, find_layer_faults, find_missing_features
from pagedkv.plugin.interface import (
    AttentionKernels,
    BackendInfo,
    CacheManager,
    Capacity,
    ModelAdapter,
    Scheduler,
    WarmupLimits,
)
from pagedkv.plugin.kv_events import FlushesPrefixCache, KVEventListener, ReportsKVEvents
from pagedkv.plugin.kv_scales import LayerScales, load_kv_scales, warn_of_unsafe_scales
from pagedkv.plugin.limits import ResolvedLimits, resolve_limits
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import CACHE_MANAGERS, KERNELS, MODELS, SCHEDULERS, create_plugin, load_plugin
from pagedkv.plugin.requests import SAMPLING_FEATURES, Request, RequestId, StepOutput, find_finish_reason
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.sampling.sampler import SampledToken
from pagedkv.plugin.stats import BackendStats, Counters
from pagedkv.plugin.step_plan import NewSequence, StepPlan
from pagedkv.plugin.validation import validate_requests

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """The objects that one warm-up creates."""

    cache: CacheManager
    scheduler: Scheduler
    limits: ResolvedLimits
    num_blocks: int


class PagedBackend:
    """Continuous batching over a paged cache. See `pagedkv.plugin.interface.Backend`.

    If the process has joined a group, this is one of several shards: every call must then be made on all of them in the
    same order, and a step that fails raises ShardError and ends them all.
    """

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    features: ClassVar[frozenset[str]] = SAMPLING_FEATURES

    def __init__(self, config: ResolvedConfig, model: ModelAdapter, kernels: AttentionKernels) -> None:
        self._config = config
        self._model = model
        self._kernels = kernels
        self._eos_token_ids = model.spec.eos_token_ids
        self._executor = StepExecutor(config, model, kernels, _load_static_scales(config, model))
        self._agreement = StepAgreement(joined_group())
        self._pacer = StepPacer(config.scheduler.max_gap_s)
        self._sequences: dict[RequestId, LiveSequence] = {}
        self._counters = Counters()
        self._pool: Pool | None = None
        self._kv_event_listener: KVEventListener | None = None
        self._is_closed = False

    @classmethod
    def create(cls, config: ResolvedConfig) -> Self:
        if config.scheduler.max_gap_s and joined_group():
            raise UnsupportedError(
                "scheduler.max_gap_ms follows each process's own clock, and shards must decide alike; set it to 0, and "
                "scheduler.max_step_tokens as low as the gap needs"
            )
        _refuse_unknown_plans(config)
        kernels = create_plugin(KERNELS, config.kernels, config.plugins, config.device)
        model = create_plugin(MODELS, config.model.adapter, config.plugins, config, config.device)
        _refuse_unsupported_layers(config, model.spec, kernels)
        return cls(config, model, kernels)

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            backend="paged",
            model=self._model.spec,
            device=self._config.device,
            dtype=self._config.dtype,
            kv_dtype=self._config.cache.kv_dtype,
            attention_kernels=self._kernels.name,
            block_size=self._config.cache.block_size,
            requires_padding=False,
            can_chunk_prefill=True,
            has_prefix_cache=self._config.cache.has_prefix_cache,
        )

    def warmup(self, limits: WarmupLimits) -> Capacity:
        self._refuse_closed()
        if self._sequences:
            raise UnavailableError("the cache can't be sized while requests are running; end them first")
        resolved = resolve_limits(limits, self._config, self._model.spec, can_chunk_prefill=self.info.can_chunk_prefill)
        previous, self._pool = self._pool, None
        try:
            with self._agreement.warming_up():
                num_blocks = self._size_pool(resolved)
                fitting = resolved.fit(num_blocks * self._config.cache.block_size)
                self._install_pool(num_blocks, fitting, resolved.max_total_tokens)
        except ShardError:
            raise
        except Exception:
            if previous is not None:
                with self._agreement.warming_up():
                    self._install_pool(previous.num_blocks, previous.limits, previous.limits.max_total_tokens)
            raise
        return self._describe_capacity(num_blocks, fitting)

    def add(self, requests: Sequence[Request]) -> None:
        pool = self._require_pool()
        max_input_tokens, max_total_tokens = pool.limits.max_input_tokens, pool.limits.max_total_tokens
        validate_requests(requests, self._sequences, self._model.spec.vocab_size, max_input_tokens, max_total_tokens)
        sequences = [
            LiveSequence.create(request, arrival, self._agreement.derive_seed(arrival))
            for arrival, request in enumerate(requests, self._counters.num_requests)
        ]
        queued: list[RequestId] = []
        try:
            for sequence in sequences:
                pool.scheduler.add(_describe_sequence(sequence))
                queued.append(sequence.id)
        except CapacityError:
            pool.scheduler.abort(queued)
            raise
        for sequence in sequences:
            self._sequences[sequence.id] = sequence
            self._counters.count_request(sequence.request)

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        plan = self.schedule(only)
        if not plan.scheduled:
            return []
        return self.commit(plan, self.execute(plan))

    def schedule(self, only: Collection[RequestId] | None = None) -> StepPlan:
        """Plans the next step. A plan with rows must be executed and committed before the next call."""
        max_chunk_tokens = self._pacer.max_chunk_tokens(self._sequences, only)
        plan = self._require_pool().scheduler.schedule(only, max_chunk_tokens)
        self._agreement.check_plan(plan)
        for row in plan.scheduled:
            sequence = self._sequences[row.id]
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = row.num_cached_tokens
                sequence.admitted_s = time.monotonic()
                self._counters.saved_prefill_tokens += row.num_cached_tokens
        return plan

    def execute(self, plan: StepPlan) -> Mapping[RequestId, SampledToken]:
        """Runs the model over a plan with rows. Returns a token for each row that is its sequence's last chunk.

        Raises:
            StepError: the plan failed; its sequences have ended and their blocks are free.
        """
        try:
            with self._agreement.running(plan), self._pacer.measuring(plan):
                return self._executor.run(plan, self._sequences)
        except ShardError:
            raise
        except BaseException as error:
            self._fail(plan)
            if not isinstance(error, Exception):
                raise
            raise _describe_failure(plan, error) from error

    def commit(self, plan: StepPlan, sampled: Mapping[RequestId, SampledToken]) -> list[StepOutput]:
        """Adds a step's tokens to the sequences; ends and releases the finished ones.

        Raises:
            StepError: the scheduler or cache manager raised; the plan's sequences have ended.
        """
        self._agreement.note_tokens(sampled)
        num_decode_tokens = self._count_decode_tokens(plan)
        in_order = sorted(sampled, key=lambda id_: self._sequences[id_].arrival)
        outputs = [self._take_token(self._sequences[id_], sampled[id_]) for id_ in in_order]
        finished = [output.request_id for output in outputs if output.finish_reason]
        try:
            self._require_pool().scheduler.commit(plan, finished)
        except BaseException as error:
            self._fail(plan)
            if not isinstance(error, Exception):
                raise
            raise _describe_failure(plan, error) from error
        for id_ in finished:
            del self._sequences[id_]
        self._counters.count_step(outputs, plan.num_tokens - num_decode_tokens, num_decode_tokens)
        return outputs

    def _fail(self, plan: StepPlan) -> None:
        """Ends a plan's sequences, so that whatever was raised leaves a backend that goes on."""
        scheduler = self._require_pool().scheduler
        ids = [row.id for row in plan.scheduled]
        for id_ in ids:
            self._sequences.pop(id_, None)
        try:
            scheduler.fail(plan)
        except IntegrityError:
            # It was raised in the middle of a commit, which had closed the plan.
            scheduler.abort(ids)

    def abort(self, ids: Collection[RequestId]) -> None:
        live = [id_ for id_ in dict.fromkeys(ids) if id_ in self._sequences]
        if live:
            self._require_pool().scheduler.abort(live)
        for id_ in live:
            del self._sequences[id_]

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> BackendStats:
        cache = self._pool.cache.stats() if self._pool else NO_CACHE
        scheduler = self._pool.scheduler.stats() if self._pool else NO_SCHEDULER
        return make_stats(
            self._counters, cache, scheduler, self._executor.bytes_per_block, self._config.cache.block_size
        )

    def set_kv_event_listener(self, listener: KVEventListener | None) -> bool:
        """See `ReportsKVEvents`; before the first warm-up it answers for a manager that tells."""
        self._kv_event_listener = listener
        cache = self._pool.cache if self._pool else None
        if isinstance(cache, ReportsKVEvents):
            return cache.set_kv_event_listener(listener)
        return cache is None

    def flush_prefix_cache(self) -> int:
        """See `FlushesPrefixCache`; 0 with a manager that can't."""
        cache = self._require_pool().cache
        return cache.flush_prefix_cache() if isinstance(cache, FlushesPrefixCache) else 0

    def check_integrity(self) -> None:
        if self._pool:
            self._pool.cache.check_integrity()

    def close(self) -> None:
        if not self._is_closed:
            self.abort(list(self._sequences))
            self._executor.allocate(0)
            self._pool = None
            self._is_closed = True

    def _agree_on_padded_decodes(self) -> None:
        """Turns padded decodes off if one shard could not capture its graphs: collectives must have the same size."""
        if not agree_on_minimum(int(self._executor.has_padded_decodes)):
            self._executor.drop_padded_decodes()

    def _size_pool(self, limits: ResolvedLimits) -> int:
        device, block_size = self._config.device, self._config.cache.block_size
        activation_bytes = measure_activation_bytes(self._executor, self._config, limits)
        blocks_per_request = -(-limits.max_total_tokens // block_size)
        min_num_blocks = -(-limits.min_cache_tokens // block_size)
        return size_pool(
            self._config.cache.budget,
            device,
            bytes_per_block=self._executor.bytes_per_block,
            used_bytes=torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
            activation_bytes=activation_bytes,
            min_num_blocks=min_num_blocks,
            max_num_blocks=blocks_per_request * self._config.scheduler.max_num_sequences,
        )

    def _install_pool(self, num_blocks: int, limits: ResolvedLimits, max_graph_tokens: int) -> None:
        self._executor.allocate(num_blocks)
        self._executor.prepare_decodes(self._config.graph_batch_sizes, max_graph_tokens)
        self._agree_on_padded_decodes()
        self._pool = self._make_pool(num_blocks, limits)
        if self._kv_event_listener is not None:
            self._kv_event_listener.on_cleared()
            self.set_kv_event_listener(self._kv_event_listener)

    def _make_pool(self, num_blocks: int, limits: ResolvedLimits) -> Pool:
        config = self._config
        cache = create_plugin(
            CACHE_MANAGERS,
            config.cache.manager,
            config.plugins,
            num_blocks,
            config.cache.block_size,
            has_prefix_cache=config.cache.has_prefix_cache,
            kv_dtype_name=config.cache.kv_dtype.name,
        )
        num_tokens = num_blocks * config.cache.block_size
        settings = replace(config.scheduler, max_step_tokens=limits.max_step_tokens)
        scheduler = create_plugin(SCHEDULERS, settings.name, config.plugins, settings, cache, num_tokens)
        return Pool(cache, scheduler, limits, num_blocks)

    def _describe_capacity(self, num_blocks: int, limits: ResolvedLimits) -> Capacity:
        config = self._config.cache
        num_tokens = num_blocks * config.block_size
        logger.info(
            "KV cache: %d blocks of %d tokens in %s, %.1f MiB; steps of at most %d tokens; attention kernels %s",
            num_blocks,
            config.block_size,
            config.kv_dtype.name,
            num_blocks * self._executor.bytes_per_block / 2**20,
            limits.max_step_tokens,
            self._kernels.name,
        )
        return Capacity(
            max_cache_tokens=int(num_tokens * config.overcommit),
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            num_blocks=num_blocks,
        )

    def _take_token(self, sequence: LiveSequence, sampled: SampledToken) -> StepOutput:
        token = sampled.token
        sequence.token_ids.append(token.token_id)
        request = sequence.request
        return StepOutput(
            request.id,
            token,
            sampled.top_tokens,
            sequence.take_prefill_logprobs(),
            sequence.num_cached_tokens or 0,
            find_finish_reason(request.params, sequence.num_generated_tokens, token.token_id, self._eos_token_ids),
            sequence.seed,
            sampled.raw_logprob,
            sequence.admitted_s,
        )

    def _count_decode_tokens(self, plan: StepPlan) -> int:
        rows = (row for row in plan.scheduled if row.num_tokens == 1)
        return sum(row.start >= self._sequences[row.id].num_prompt_tokens for row in rows)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UnavailableError("the backend is closed")

    def _require_pool(self) -> Pool:
        self._refuse_closed()
        if self._pool is None:
            raise UnavailableError("the backend is not warmed up; call warmup first")
        return self._pool


def _describe_failure(plan: StepPlan, error: Exception) -> StepError:
    return StepError(f"a step failed: {type(error).__name__}: {error}", [row.id for row in plan.scheduled])


def _describe_sequence(sequence: LiveSequence) -> NewSequence:
    request = sequence.request
    return NewSequence(
        request.id,
        sequence.token_ids,
        request.params.max_new_tokens,
        request.namespace,
        request.parent_id,
        may_reuse_prefix=not request.params.prefill_logprobs,
    )


def _load_static_scales(config: ResolvedConfig, model: ModelAdapter) -> Sequence[LayerScales | None]:
    """Loads the static scales of each layer; None if the KV dtype stores its scales in blocks, or has none."""
    if not config.cache.kv_dtype.has_static_scales:
        return [None] * len(model.spec.layers)
    group = joined_group()
    shard = group.info if group else ShardInfo()
    scales = load_kv_scales(
        config.cache.kv_dtype,
        config.cache.kv_scales,
        model,
        model.spec.layers,
        config.device,
        shard=shard.rank,
        num_shards=shard.num_shards,
    )
    warn_of_unsafe_scales(scales, model.spec)
    return scales


def _refuse_unknown_plans(config: ResolvedConfig) -> None:
    scheduler = load_plugin(SCHEDULERS, config.scheduler.name)
    missing = find_missing_features(PagedBackend, getattr(scheduler, "plan_features", ()))
    if missing:
        raise UnsupportedError(
            f"plans of the scheduler {config.scheduler.name!r} need features that the backend 'paged' does not have: "
            f"{', '.join(missing)}"
        )


def _refuse_unsupported_layers(config: ResolvedConfig, model: ModelSpec, kernels: AttentionKernels) -> None:
    reasons: dict[str, None] = {}
    for layer in model.layers:
        cache_spec = layer.cache_spec(config.cache.block_size, config.cache.kv_dtype)
        reasons.update(dict.fromkeys(find_layer_faults(kernels, layer, cache_spec, config.dtype)))
    if reasons:
        raise UnsupportedError(
            f"the attention kernels {kernels.name!r} can't serve {model.architecture} here: " + "; ".join(reasons)
        )
