"""Implements the eight methods of `generate.v3.TextGenerationService`."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

from pagedkv.adapters.rpc.calls import Context, read_trace_context
from pagedkv.adapters.rpc.refusals import find_refusal
from pagedkv.adapters.rpc.request_log import RequestLog
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.answers import AnswerWriter
from pagedkv.adapters.tgi.batch_runner import BatchRunner, StepResult
from pagedkv.adapters.tgi.batches import LiveRequest
from pagedkv.adapters.tgi.convert import EarlyEnd, EndMarks, to_cached_batch, to_info, to_limits, to_warmup_response
from pagedkv.adapters.tgi.prompts import PromptEncoder, TokenTexts, max_prompt_bytes
from pagedkv.adapters.tgi.request_reader import SHARED_NAMESPACE, RequestReader, refuse
from pagedkv.adapters.tgi.step_loop import StepLoop
from pagedkv.plugin.errors import DrainingError, PagedKVError, RequestError, UnavailableError
from pagedkv.plugin.interface import Backend, BackendInfo, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.observer import Observers
from pagedkv.plugin.requests import CacheNamespace, RequestId

logger = logging.getLogger(__name__)

_NUM_TOKENIZER_THREADS = 2

T = TypeVar("T")


class GenerationService:
    """Serves one backend. Every method runs on one event loop; steps run on a separate thread.

    Only the service may call the backend until `close` has returned; after that the caller may.

    Args:
        backend: an open backend. `warm_up` or a client's Warmup warms it up.
        tokenizer: of the backend's model.
        urls: the response of ServiceDiscovery.
        has_chunked_prefill: whether to report to clients that new and running requests may share a step.
        stuck_step_timeout_s: Health fails while one step has been running for longer.
        rank, num_shards: this server's place among the shards of one model.
        abandoned_batch_timeout_s: a batch that no call has named for this long is ended. This finds clients that died
            between two calls; a live router names its batches in every call.
        cache_salt_metadata_key: the metadata key of a Prefill that holds the cache salt of its prompts; "" for none.
        tells_refusal_reason: whether the text of a request that is refused or fails says why.
        tells_cached_tokens: whether the metadata of an answer says what the prefix cache held.
        has_prompts_in_log: whether the log line of an ended request includes its prompt.
        observers: called for requests and steps, in addition to the log.
        step_loop: runs the steps; closed by `close`. On one of several shards it gives them one order on all: then
            what a job decides must be a function of the jobs before it, never of a clock.
        on_warm: called after each successful warm-up.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        urls: Sequence[str] = (),
        has_chunked_prefill: bool = True,
        stuck_step_timeout_s: float = 120.0,
        rank: int = 0,
        num_shards: int = 1,
        abandoned_batch_timeout_s: float = 600.0,
        cache_salt_metadata_key: str = "",
        tells_refusal_reason: bool = True,
        tells_cached_tokens: bool = True,
        has_prompts_in_log: bool = False,
        observers: Observers | None = None,
        step_loop: StepLoop | None = None,
        on_warm: Callable[[Capacity], Awaitable[None]] | None = None,
    ) -> None:
        self.urls = list(urls)
        self._info = backend.info
        self._info_message = to_info(self._info, has_chunked_prefill)
        encoder = PromptEncoder(tokenizer, max_prompt_bytes(self._info.model.max_position_tokens))
        self._reader = RequestReader(tokenizer, encoder, has_prompts_in_log)
        texts = TokenTexts(tokenizer)
        marks = EndMarks(next(iter(self._info.model.eos_token_ids), 0), tells_refusal_reason)
        self._writer = AnswerWriter(texts, marks, tells_cached_tokens)
        observers = observers or Observers()
        self._observers = replace(observers, requests=(RequestLog(), *observers.requests))
        self._runner = BatchRunner(backend, texts, rank, num_shards, self._observers)
        self._loop = step_loop or StepLoop()
        self._on_warm = on_warm
        self._tokenizer_threads = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="pagedkv-tokenizer")
        self._stuck_step_timeout_s = stuck_step_timeout_s
        self._abandoned_batch_timeout_s = abandoned_batch_timeout_s
        self._cache_salt_metadata_key = cache_salt_metadata_key
        self._is_draining = False
        self._is_closed = False
        self._integrity_fault: Exception | None = None
        self._num_arriving = 0
        self._has_unchecked_steps = False

    @property
    def num_requests(self) -> int:
        """Live requests, and requests that are being tokenized or added."""
        return self._runner.num_requests + self._num_arriving

    def is_live(self, batch_id: int) -> bool:
        """Whether a batch of this id has live requests."""
        return self._runner.is_live(batch_id)

    def step_running_s(self) -> float:
        """How long the current step has been running, in seconds; 0 between steps and before the warm-up."""
        return self._loop.busy_s() if self._runner.is_warm else 0.0

    def find_health_fault(self) -> str | None:
        """Returns why no requests should be sent here, or None if the service is healthy. Never blocks."""
        if self._is_draining:
            return "the server is draining: running requests finish, new ones are refused"
        if not self._runner.is_warm:
            return "the server is not warmed up yet"
        if self._integrity_fault is not None:
            return f"the check of the cache's bookkeeping failed: {self._integrity_fault}"
        busy_s = self._loop.busy_s()
        if busy_s > self._stuck_step_timeout_s:
            return f"a step has been running for {busy_s:.0f} s, which is taken for stuck"
        return None

    async def warm_up(self, limits: WarmupLimits) -> Capacity:
        """Sizes the cache for the largest step that the limits allow. After this the service is healthy.

        Raises:
            RequestError: requests are live.
            CapacityError: one request of these limits does not fit into memory.
        """
        capacity = await self._loop.run(functools.partial(self._runner.warm_up, limits))
        _log_capacity(self._info, capacity)
        if self._on_warm:
            await self._on_warm(capacity)
        return capacity

    def begin_drain(self) -> None:
        """Makes Health fail and refuses new requests from now on. Running requests continue."""
        self._is_draining = True

    async def check_when_idle(self) -> None:
        """Runs the backend's integrity check if it is idle and has run since the last check. A fault fails Health."""
        if not self._has_unchecked_steps or self.num_requests or self._loop.is_running_job:
            return
        self._has_unchecked_steps = False
        try:
            await self._loop.run(self._runner.check_integrity)
        except Exception as error:
            logger.critical("the check of the cache's bookkeeping failed", exc_info=error)
            self._integrity_fault = error

    def find_abandoned(self) -> list[tuple[int, int]]:
        """Batches that no call has named for `abandoned_batch_timeout_s`: id, and number of the last step of each."""
        return [] if self._loop.is_running_job else self._runner.find_abandoned(self._abandoned_batch_timeout_s)

    async def end_abandoned(self, batches: Sequence[tuple[int, int]] | None = None) -> None:
        """Ends these batches, None: those that `find_abandoned` finds; not those that a call has named since."""
        abandoned = self.find_abandoned() if batches is None else batches
        if abandoned:
            await self._loop.run(functools.partial(self._runner.end_abandoned, abandoned))

    async def close(self) -> None:
        """Ends every request and stops the threads. The backend stays open. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._loop.run(self._runner.clear)
        await asyncio.to_thread(self._loop.close)
        self._tokenizer_threads.shutdown(wait=False, cancel_futures=True)

    async def info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return self._info_message

    async def service_discovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    async def health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        fault = self.find_health_fault()
        if fault is not None:
            raise UnavailableError(fault)
        return pb.HealthResponse()

    async def warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Warms the backend up. The request's batch is not run: the backend builds the largest step of the limits
        itself, with prompt log-probabilities and top tokens."""
        capacity = await self.warm_up(to_limits(request, self._info_message.support_chunking))
        return to_warmup_response(request, capacity, self._info)

    async def clear_cache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        batch_ids = [request.id] if request.HasField("id") else None
        await self._loop.run(functools.partial(self._runner.clear, batch_ids))
        return pb.ClearCacheResponse()

    async def filter_batch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        state = await self._loop.run(
            functools.partial(
                self._runner.filter, request.batch_id, [RequestId(request_id) for request_id in request.request_ids]
            )
        )
        return pb.FilterBatchResponse(batch=to_cached_batch(state))

    async def prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        arrived_s, started_ns = time.monotonic(), time.perf_counter_ns()
        self._num_arriving += len(request.batch.requests)
        try:
            requests = await self._read_or_give_up(request, context, arrived_s)
            result, response = await self._add_and_step(request, requests, started_ns)
        except Exception as error:
            refusal = find_refusal(error)
            if refusal is not None:
                self._observers.report_refusal(refusal, len(request.batch.requests))
            raise
        finally:
            self._num_arriving -= len(request.batch.requests)
        context.set_trailing_metadata(self._writer.trailers(result))
        return response

    async def decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        started_ns = time.perf_counter_ns()
        batch_ids = [batch.id for batch in request.batches]

        def step() -> tuple[StepResult, pb.DecodeResponse]:
            result = self._runner.decode(batch_ids)
            return result, self._writer.write(pb.DecodeResponse(), result, started_ns)

        result, response = await self._run_step(step, batch_ids)
        context.set_trailing_metadata(self._writer.trailers(result))
        return response

    async def _read_or_give_up(
        self, request: pb.PrefillRequest, context: Context, arrived_s: float
    ) -> list[LiveRequest | EarlyEnd]:
        try:
            return await self._read_requests(request, context, arrived_s)
        except PagedKVError:
            if request.HasField("cached_batch"):
                give_up = functools.partial(self._runner.give_up, request.cached_batch.id, request.batch.id)
                await self._loop.run(give_up)
            raise

    async def _read_requests(
        self, request: pb.PrefillRequest, context: Context, arrived_s: float
    ) -> list[LiveRequest | EarlyEnd]:
        """Reads the requests of a Prefill, refused ones too.

        Raises:
            RequestError: there is none, or the call's metadata is ambiguous.
            DrainingError: nothing new is taken, and no running batch comes along that would end with an error.
        """
        messages = request.batch.requests
        if not messages:
            raise RequestError("the batch has no requests; send at least one")
        if self._is_draining:
            error = DrainingError("the server is draining; send new requests elsewhere")
            if not request.HasField("cached_batch"):
                raise error
            return [refuse(RequestId(message.id), error) for message in messages]
        return await asyncio.get_running_loop().run_in_executor(
            self._tokenizer_threads,
            self._reader.read,
            request.batch,
            self._read_namespace(context),
            read_trace_context(context),
            arrived_s,
        )

    async def _add_and_step(
        self, request: pb.PrefillRequest, requests: list[LiveRequest | EarlyEnd], started_ns: int
    ) -> tuple[StepResult, pb.PrefillResponse]:
        running_id = request.cached_batch.id if request.HasField("cached_batch") else None
        named = [] if running_id is None else [running_id]

        def step() -> tuple[StepResult, pb.PrefillResponse]:
            result = self._runner.prefill(request.batch.id, requests, running_id)
            named.append(request.batch.id)
            return result, self._writer.write(pb.PrefillResponse(), result, started_ns)

        return await self._run_step(step, named)

    async def _run_step(self, step: Callable[[], T], batch_ids: Sequence[int]) -> T:
        """Runs a step for a client. If the client cancels meanwhile, its batches end after the step.

        Such a client has lost tokens and can't continue. The step itself is not interrupted. `batch_ids` is read when
        the call is cancelled, so it may change until then."""
        self._has_unchecked_steps = True
        try:
            return await self._loop.run(step)
        except asyncio.CancelledError:
            self._loop.post(lambda: self._runner.clear(batch_ids))
            raise

    def _read_namespace(self, context: Context) -> CacheNamespace | None:
        """Returns the cache namespace of a call's prompts; None where each has its own, because nobody says whose they
        are. Raises RequestError if the metadata is ambiguous."""
        if not self._cache_salt_metadata_key:
            return SHARED_NAMESPACE
        salts = [value for key, value in context.invocation_metadata() or () if key == self._cache_salt_metadata_key]
        if len(salts) > 1:
            raise RequestError(f"the metadata has {self._cache_salt_metadata_key} {len(salts)} times; send it once")
        return CacheNamespace(salt=str(salts[0])) if salts and salts[0] else None


def _log_capacity(info: BackendInfo, capacity: Capacity) -> None:
    bytes_per_block = info.model.bytes_per_block(info.block_size, info.kv_dtype)
    fields = {
        "backend": info.backend,
        "kv_dtype": info.kv_dtype.name,
        "bytes_per_token": bytes_per_block // info.block_size,
        "block_size": info.block_size,
        "num_blocks": capacity.num_blocks,
        "kv_bytes_total": capacity.num_blocks * bytes_per_block,
        **asdict(capacity),
    }
    logger.info("capacity: %s", json.dumps(fields), extra={"fields": fields})
