"""The methods of `vllm.grpc.engine.VllmEngine`, as the SMG gateway calls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv.adapters.rpc.calls import Context, read_trace_context
from pagedkv.adapters.rpc.refusals import find_refusal
from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.convert import to_generation
from pagedkv.adapters.smg.kv_events import EventGapError, KvEventLog, UnknownEventNumberError
from pagedkv.adapters.smg.loads import LoadMeter
from pagedkv.adapters.smg.samples import SampleWriter
from pagedkv.adapters.smg.tokenizer_archive import build_archive, split_archive
from pagedkv.plugin.errors import DuplicateRequestError, RequestError, UnsupportedError
from pagedkv.plugin.interface import BackendInfo, Capacity, Tokenizer
from pagedkv.plugin.kv_events import FlushesPrefixCache
from pagedkv.plugin.observer import Observers, Outcome, Refusal
from pagedkv.plugin.serving.async_inbox import AsyncGeneration, AsyncInbox
from pagedkv.plugin.serving.loop import ServingLoop

_BUSY_RECORD_INTERVAL_S = 1.0
_IDLE_RECORD_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the gateway is told of a worker once."""

    model_directory: Path
    served_model_name: str
    """The model's name in the gateway's HTTP API."""
    model_type: str
    default_sampling_params_json: str
    """What the gateway fills in where a client names nothing; empty where the checkpoint says nothing."""
    max_num_sequences: int


class SmgWorker:
    """Serves one backend through its serving loop. Every method runs on one event loop.

    Args:
        loop: of a backend that is warmed up: a gateway sends work to whoever answers.
        info: of the backend.
        capacity: of the backend.
        tokenizer: of the model, for stop strings.
        facts: about model and configuration.
        find_fault: why no work should be sent here; None while all is well. Waits for nothing.
        observers: told of refused requests.
        events: None where the backend does not tell what is findable.
        cache: the backend, if its prefix cache can be dropped.
    """

    def __init__(
        self,
        loop: ServingLoop,
        info: BackendInfo,
        capacity: Capacity,
        tokenizer: Tokenizer,
        facts: WorkerFacts,
        *,
        find_fault: Callable[[], str | None],
        observers: Observers | None = None,
        events: KvEventLog | None = None,
        cache: FlushesPrefixCache | None = None,
    ) -> None:
        self._loop = loop
        self._inbox = AsyncInbox(loop)
        self._info = info
        self.capacity = capacity
        """Of the last warm-up."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._find_fault = find_fault
        self._observers = observers or Observers()
        self._events = events
        self._cache = cache
        self._loads = LoadMeter(loop, facts.max_num_sequences)
        self._generations: dict[str, AsyncGeneration | None] = {}
        """By the gateway's id; None until the backend has accepted the request."""
        self._aborted: set[str] = set()
        self._started_s = time.time()
        self._archive: asyncio.Task[bytes] | None = None
        self._has_ended = asyncio.Event()

    def end_streams(self) -> None:
        """Ends the streams that never end by themselves: whoever waits for calls to finish would wait for them."""
        self._has_ended.set()

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes `GenerateResponse`s. Nothing is sent before the backend has accepted the prompt."""
        request_id = request.request_id
        if request_id in self._generations:
            self._observers.report_refusal(Refusal.DUPLICATE, 1)
            raise DuplicateRequestError(f"request {request_id!r} is running already; use another id")
        self._generations[request_id] = None
        try:
            generation = await self._start(request, context)
        except BaseException:
            del self._generations[request_id]
            self._aborted.discard(request_id)
            raise
        self._generations[request_id] = generation
        try:
            if request_id in self._aborted:
                generation.abort()
            writers = self._make_writers(generation)
            await _write_tokens(generation, writers, context, is_stream=request.stream)
            if request_id in self._aborted:
                for writer in writers:
                    if not writer.finish_reason:
                        await context.write(writer.take_complete())
        finally:
            self._generations.pop(request_id, None)
            self._aborted.discard(request_id)
            generation.close()

    async def _start(self, request: pb.GenerateRequest, context: Context) -> AsyncGeneration:
        try:
            return await self._inbox.start(to_generation(request, self.capacity, read_trace_context(context)))
        except Exception as error:
            refusal = find_refusal(error)
            if refusal is not None:
                self._observers.report_refusal(refusal, 1)
            raise

    def _make_writers(self, generation: AsyncGeneration) -> list[SampleWriter]:
        request = generation.samples[0].generation
        return [
            SampleWriter(sample.index, request.params, request.prompt_ids, self._tokenizer)
            for sample in generation.samples
        ]

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests; unknown ones are passed over: most have ended already."""
        for request_id in request.request_ids:
            if request_id not in self._generations:
                continue
            self._aborted.add(request_id)
            generation = self._generations[request_id]
            if generation is not None:
                generation.abort()
        return pb.AbortResponse()

    async def health_check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        fault = self._find_fault()
        return pb.HealthCheckResponse(healthy=fault is None, message=fault or "")

    async def get_model_info(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._info.model
        return pb.GetModelInfoResponse(
            model_path=str(self._facts.model_directory),
            tokenizer_path=str(self._facts.model_directory),
            is_generation=True,
            max_context_length=self.capacity.max_total_tokens,
            max_req_input_len=self.capacity.max_input_tokens,
            vocab_size=model.vocab_size,
            served_model_name=self._facts.served_model_name,
            model_type=self._facts.model_type,
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=self._facts.default_sampling_params_json,
        )

    async def get_server_info(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._loop.num_live,
            uptime_seconds=time.time() - self._started_s,
            server_type="pagedkv",
            data_parallel_size=1,
            kv_cache_dtype=self._info.kv_dtype.name,
            block_size=self._info.block_size,
            attention_backend=self._info.attention_kernels,
            model_dtype=str(self._info.dtype),
            max_num_seqs=self._facts.max_num_sequences,
        )

    async def get_loads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        if request.dp_rank != 0:
            raise RequestError(f"there is no data parallel rank {request.dp_rank}; this worker is the only one")
        return self._loads.response()

    async def get_tokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> None:
        if self._archive is None:
            self._archive = asyncio.create_task(asyncio.to_thread(build_archive, self._facts.model_directory))
        for chunk in split_archive(await asyncio.shield(self._archive)):
            await context.write(chunk.SerializeToString())

    async def flush_cache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drops cached blocks that nobody holds, once no request runs: at once, or within `timeout_s`."""
        if self._cache is None:
            return pb.FlushCacheResponse(success=False, message="this backend has no prefix cache")
        deadline_s = time.monotonic() + max(0.0, request.timeout_s)
        while self._loop.num_live and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        if self._loop.num_live:
            message = f"{self._loop.num_live} requests are running; try again when they have ended"
            return pb.FlushCacheResponse(success=False, message=message)
        num_blocks = await asyncio.wrap_future(self._loop.run_on_thread(self._cache.flush_prefix_cache))
        return pb.FlushCacheResponse(success=True, message=f"{num_blocks} blocks were dropped")

    async def subscribe_kv_events(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Writes `KvEventBatch`es: what is findable now, or what came since a number; then what comes.

        Raises:
            UnsupportedError: the backend tells nothing; the gateway then routes by what it has sent itself.
            UnknownEventNumberError: the number is not one of this process, or too old; ask again from 0.
            EventGapError: the subscriber is too slow; ask again from 0.
        """
        events = self._events
        if events is None:
            raise UnsupportedError("this backend does not tell which blocks are findable")
        number = request.start_sequence_number
        if number and not events.can_resume(number):
            # Before anything is sent: the gateway begins anew where a call is refused, and tries the same position
            # again where a stream breaks.
            raise UnknownEventNumberError(
                f"batch {number} is not known here any more; the last one is {events.last_number}"
            )
        await context.send_initial_metadata(())
        has_begun = number > 0
        if not number:
            for batch in events.snapshot():
                await context.write(batch + self._load_bytes(load_only=False))
                has_begun = True
            number = events.last_number
        while not self._has_ended.is_set():
            if not events.can_resume(number):
                raise EventGapError("the subscriber was too slow; ask again from 0")
            batches = events.read(number)
            for batch in batches:
                number += 1
                has_begun = True
                await context.write(batch + self._load_bytes(load_only=False))
            if not batches and (has_begun or request.load_records_before_first_batch):
                last_seen = number if has_begun else 0
                await context.write(
                    pb.KvEventBatch(sequence_number=last_seen).SerializeToString() + self._load_bytes(load_only=True)
                )
            await self._wait_for_events(events, number)

    async def _wait_for_events(self, events: KvEventLog, number: int) -> None:
        interval_s = _BUSY_RECORD_INTERVAL_S if self._loop.num_live else _IDLE_RECORD_INTERVAL_S
        news = asyncio.create_task(events.wait(number, interval_s))
        end = asyncio.create_task(self._has_ended.wait())
        try:
            await asyncio.wait((news, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            end.cancel()

    def _load_bytes(self, *, load_only: bool) -> bytes:
        """A field of a `KvEventBatch`, to be appended to a serialized one."""
        return pb.KvEventBatch(load=self._loads.record(load_only=load_only)).SerializeToString()


async def _write_tokens(
    generation: AsyncGeneration, writers: Sequence[SampleWriter], context: Context, *, is_stream: bool
) -> None:
    """Writes what comes until every sample has ended: of each read one chunk a sample, and its end."""
    while tokens := await generation.read():
        touched: dict[int, SampleWriter] = {}
        for sample, output in tokens:
            writer = writers[sample.index]
            if writer.finish_reason and sample.index not in touched:
                continue  # It came while the one that ended the sample was on its way.
            touched[sample.index] = writer
            if not writer.finish_reason:
                writer.push(output)
                if writer.finish_reason and output.finish_reason is None:
                    generation.end(sample, Outcome.STOP_SEQUENCE)
        for writer in touched.values():
            if is_stream:
                await context.write(writer.take_chunk())
            if writer.finish_reason:
                await context.write(writer.take_complete())
