"""The contiguous backend: the padded cache of model servers without a paged cache, implemented well.

Each request reserves slots for `max_total_tokens` from its admission to its end, because the server can't know how many
it will need. Other requests wait, first come, first served. New requests are prefilled together, left-padded; running
rows are decoded together. A step is either prefill or decode, and a prompt is never split.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch

from pagedkv.plugin.distributed import joined_group
from pagedkv.plugin.errors import StepError, UnavailableError, UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import BackendInfo, Capacity, WarmupLimits
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.limits import resolve_limits
from pagedkv.plugin.requests import SAMPLING_FEATURES, Request, RequestId, StepOutput, find_finish_reason
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.sampling.prefill_logprobs import prefill_logprobs
from pagedkv.plugin.sampling.sampler import SampledToken, Sampler
from pagedkv.plugin.stats import BackendStats, Counters
from pagedkv.plugin.validation import validate_requests

from .contiguous_batch import ContiguousBatch, LiveRow, join_rows, split_rest
from .contiguous_model import ContiguousModel
from .contiguous_sizing import ContiguousCapacity, compute_capacity
from .contiguous_stats import check_rows, make_stats
from .contiguous_warmup import measure_largest_batch, measure_prefill, run_full_decode
from .idle_rows import IdleRows

logger = logging.getLogger(__name__)


class ContiguousBackend:
    """Left-padded batches with transformers' `past_key_values`. See `pagedkv.plugin.interface.Backend`."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    features: ClassVar[frozenset[str]] = SAMPLING_FEATURES

    def __init__(self, config: ResolvedConfig, model: ContiguousModel) -> None:
        self._config = config
        self._info = _describe(config, model)
        self._model: ContiguousModel | None = model
        self._sampler = Sampler(model.spec.vocab_size, model.device, model.spec.eos_token_ids)
        self._bytes_per_token = model.bytes_per_token
        self._capacity: ContiguousCapacity | None = None
        self._waiting: dict[RequestId, LiveRow] = {}
        self._batches: list[ContiguousBatch] = []
        self._idle_rows = IdleRows()
        self._counters = Counters()

    @classmethod
    def create(cls, config: ResolvedConfig) -> ContiguousBackend:
        wanted, kept = config.cache.kv_dtype, KV_DTYPE_OF_TORCH[config.dtype]
        if wanted != kept:
            raise UnsupportedError(
                f"the contiguous backend keeps keys and values in the model's dtype ({kept.name}), not in "
                f"{wanted.name}; set cache.kv_dtype to auto, or the backend to paged"
            )
        if joined_group() is not None:
            raise UnsupportedError("the contiguous backend serves a model with one shard; set the backend to paged")
        if config.scheduler.max_gap_s:
            raise UnsupportedError(
                "the contiguous backend computes a prompt in one step, so that scheduler.max_gap_ms can't be kept; set "
                "it to 0, or the backend to paged"
            )
        return cls(config, ContiguousModel.load(config))

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warmup(self, limits: WarmupLimits) -> Capacity:
        model = self._require_model()
        if self.has_unfinished():
            raise UnavailableError("the cache can't be sized while requests are running; end them first")
        resolved = resolve_limits(limits, self._config, model.spec, can_chunk_prefill=self._info.can_chunk_prefill)
        activation_bytes = measure_prefill(
            model,
            self._sampler,
            max_prefill_tokens=resolved.max_prefill_tokens,
            max_input_tokens=resolved.max_input_tokens,
            max_rows=resolved.max_num_sequences,
        )
        fitting = compute_capacity(
            resolved, self._config, bytes_per_token=self._bytes_per_token, activation_bytes=activation_bytes
        )
        self._capacity = self._try_decoding(model, fitting)
        return self._describe_capacity(self._capacity)

    def add(self, requests: Sequence[Request]) -> None:
        limits, model = self._require_capacity().limits, self._require_model()
        validate_requests(
            requests, self._live_ids(), model.spec.vocab_size, limits.max_input_tokens, limits.max_total_tokens
        )
        for request in requests:
            self._waiting[request.id] = LiveRow.create(request, self._counters.num_requests)
            self._counters.count_request(request)

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        """Prefills waiting requests if one can be admitted, else decodes the running ones together."""
        capacity, model = self._require_capacity(), self._require_model()
        ids = self._live_ids() if only is None else self._live_ids().intersection(only)
        self._idle_rows.note_step(
            ids, is_anybody_waiting=bool(self._waiting), has_found_no_room=self._has_no_room(capacity, ids)
        )
        if idle := self._idle_rows.find(self._running_rows()):
            self._requeue(idle)
        batch = self._admit(capacity, model, ids) or self._join_running(ids)
        if batch is None:
            return []
        num_decoding = sum(row.num_computed_tokens > 0 for row in batch.rows)
        num_tokens = sum(len(row.token_ids) - row.num_computed_tokens for row in batch.rows)
        with self._dropped_on_failure(batch.rows):
            sampled, prompt_logprobs = self._compute(model, batch)
            outputs = [
                self._take_token(row, token, prompt_logprobs.get(row.id))
                for row, token in zip(batch.rows, sampled, strict=True)
            ]
            finished = {output.request_id for output in outputs if output.finish_reason}
            self._keep(batch, {row.id for row in batch.rows} - finished)
        self._counters.count_step(outputs, num_tokens - num_decoding, num_decoding)
        arrivals = {row.id: row.arrival for row in batch.rows}
        return sorted(outputs, key=lambda output: arrivals[output.request_id])

    def abort(self, ids: Collection[RequestId]) -> None:
        ids = set(ids)
        for id_ in ids:
            self._waiting.pop(id_, None)
        for batch in self._batches_with(ids):
            self._batches.remove(batch)
            self._keep(batch, {row.id for row in batch.rows}.difference(ids))

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._batches)

    def stats(self) -> BackendStats:
        return make_stats(
            self._counters, self._capacity, self._running_rows(), len(self._waiting), self._bytes_per_token
        )

    def check_integrity(self) -> None:
        if self._capacity is not None:
            check_rows(self._capacity, self._waiting.keys(), self._batches, self._bytes_per_token)

    def close(self) -> None:
        self._waiting.clear()
        self._batches.clear()
        self._model = self._capacity = None

    def _try_decoding(self, model: ContiguousModel, capacity: ContiguousCapacity) -> ContiguousCapacity:
        """On a GPU, runs a decode of the computed number of rows and reduces it if memory is not enough.

        A CPU's memory can't be tested without swapping."""
        if model.device.type != "cuda":
            return capacity
        num_rows = measure_largest_batch(
            lambda rows: run_full_decode(model, self._sampler, rows, capacity.limits.max_total_tokens),
            capacity.max_rows,
        )
        return replace(capacity, max_rows=num_rows)

    def _describe_capacity(self, capacity: ContiguousCapacity) -> Capacity:
        limits = capacity.limits
        logger.info(
            "KV cache: room for %d requests of %d tokens each, %.1f MiB; attention %s",
            capacity.max_rows,
            limits.max_total_tokens,
            capacity.max_rows * limits.max_total_tokens * self._bytes_per_token / 2**20,
            self._info.attention_kernels,
        )
        return Capacity(
            max_cache_tokens=int(capacity.num_tokens * self._config.cache.overcommit),
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            num_blocks=capacity.num_tokens,
        )

    def _admit(
        self, capacity: ContiguousCapacity, model: ContiguousModel, ids: Collection[RequestId]
    ) -> ContiguousBatch | None:
        """Admits waiting requests, in order, while their longest answers and the prefill fit."""
        num_free_rows = capacity.max_rows - len(self._running_rows())
        max_prefill_tokens = capacity.limits.max_prefill_tokens
        rows: list[LiveRow] = []
        width = 0
        for row in self._waiting.values():
            if row.id not in ids:
                continue
            width = max(width, len(row.token_ids))
            if len(rows) == num_free_rows or (rows and (len(rows) + 1) * width > max_prefill_tokens):
                break
            rows.append(row)
        for row in rows:
            del self._waiting[row.id]
            row.admitted_s = time.monotonic()
        return ContiguousBatch(rows, model.make_cache(capacity.limits.max_total_tokens), model.device) if rows else None

    def _has_no_room(self, capacity: ContiguousCapacity, ids: Collection[RequestId]) -> bool:
        """Whether one of these waits and every row is taken."""
        return len(self._running_rows()) >= capacity.max_rows and any(id_ in ids for id_ in self._waiting)

    def _requeue(self, rows: Collection[LiveRow]) -> None:
        """Takes running rows out of the cache; they wait to be computed again, in the order of arrival."""
        ids = {row.id for row in rows}
        for batch in self._batches_with(ids):
            self._batches.remove(batch)
            self._keep(batch, {row.id for row in batch.rows}.difference(ids))
        for row in rows:
            row.num_computed_tokens = 0
            self._waiting[row.id] = row
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].arrival))

    def _join_running(self, ids: Collection[RequestId]) -> ContiguousBatch | None:
        """Removes the running rows of some ids from their batches. Returns them as one batch."""
        touched = self._batches_with(ids)
        self._batches = [batch for batch in self._batches if batch not in touched]
        with torch.inference_mode(), self._dropped_on_failure([row for batch in touched for row in batch.rows]):
            rest = split_rest(touched, ids)
            joined = join_rows(touched, ids)
        self._batches += rest
        return joined

    def _keep(self, batch: ContiguousBatch, ids: Collection[RequestId]) -> None:
        """Adds a batch to the running ones, without the rows that ended."""
        with torch.inference_mode():
            kept = join_rows([batch], ids)
        if kept is not None:
            self._batches.append(kept)

    def _compute(
        self, model: ContiguousModel, batch: ContiguousBatch
    ) -> tuple[list[SampledToken], dict[RequestId, tuple[float, ...]]]:
        """Runs the rows' new tokens. Returns each row's next token, and prompt log-probabilities if requested."""
        wants_logprobs = [
            (index, row)
            for index, row in enumerate(batch.rows)
            if row.request.params.prefill_logprobs and row.num_generated_tokens == 0
        ]
        logits = model.forward(batch.make_input(), batch.cache, needs_all_logits=bool(wants_logprobs))
        prompt_logprobs = {row.id: _prompt_logprobs(logits[index], row) for index, row in wants_logprobs}
        batch.mark_computed()
        last_logits = logits[:, -1] if wants_logprobs else logits
        return self._sampler.sample(last_logits, [row.sampling for row in batch.rows]), prompt_logprobs

    def _take_token(self, row: LiveRow, sampled: SampledToken, prompt_logprobs: tuple[float, ...] | None) -> StepOutput:
        params, token_id = row.request.params, sampled.token.token_id
        row.token_ids.append(token_id)
        eos_token_ids = self._info.model.eos_token_ids
        return StepOutput(
            request_id=row.id,
            token=sampled.token,
            top_tokens=sampled.top_tokens,
            prefill_logprobs=prompt_logprobs,
            num_cached_tokens=0,
            finish_reason=find_finish_reason(params, row.num_generated_tokens, token_id, eos_token_ids),
            seed=row.sampling.seed if params.is_sampled else None,
            raw_logprob=sampled.raw_logprob,
            admitted_s=row.admitted_s,
        )

    @contextmanager
    def _dropped_on_failure(self, rows: Iterable[LiveRow]) -> Iterator[None]:
        """Removes rows if their step fails. They are in no batch while they run, so nothing else needs to be undone."""
        ids = [row.id for row in rows]
        try:
            yield
        except Exception as error:
            raise StepError(f"a step failed: {type(error).__name__}: {error}", ids) from error

    def _batches_with(self, ids: Collection[RequestId]) -> list[ContiguousBatch]:
        return [batch for batch in self._batches if any(row.id in ids for row in batch.rows)]

    def _running_rows(self) -> list[LiveRow]:
        return [row for batch in self._batches for row in batch.rows]

    def _live_ids(self) -> set[RequestId]:
        return {*self._waiting, *(row.id for row in self._running_rows())}

    def _require_model(self) -> ContiguousModel:
        if self._model is None:
            raise UnavailableError("the backend is closed")
        return self._model

    def _require_capacity(self) -> ContiguousCapacity:
        self._require_model()
        if self._capacity is None:
            raise UnavailableError("the backend is not warmed up; call warmup first")
        return self._capacity


def _describe(config: ResolvedConfig, model: ContiguousModel) -> BackendInfo:
    return BackendInfo(
        backend="contiguous",
        model=model.spec,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.cache.kv_dtype,
        attention_kernels=model.attention_name,
        block_size=1,
        requires_padding=True,
        can_chunk_prefill=False,
        has_prefix_cache=False,
    )


def _prompt_logprobs(logits: torch.Tensor, row: LiveRow) -> tuple[float, ...]:
    """Log-probabilities of a prompt from left-padded logits, [num_columns, vocab_size]: one a token, the first NaN."""
    next_ids = torch.tensor(row.token_ids[1:], dtype=torch.int64, device=logits.device)
    num_tokens = len(row.token_ids)
    return (math.nan, *prefill_logprobs(logits[-num_tokens:-1], next_ids).tolist())
