"""A router of text-generation-inference, as far as a model server can tell: its queue, its block accounting, its calls.

Virtual clients stream through it. Everything that is decided is decided by counting calls, never by a clock, so that a
seed always gives the same sequence of calls.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

CALL_TIMEOUT_S = 60
HEALTH_TIMEOUT_S = 5
CALLS_BETWEEN_HEALTH = 16
WAITING_SERVED_RATIO = 0.3
MAX_WAITING_CALLS = 20


class Ending(Enum):
    FINISHED = "finished"
    LEFT = "left"
    """The client went away; what had come until then counts."""
    FAILED = "failed"
    """The batch around it failed."""


@dataclass
class Stream:
    """One client's request and what it got."""

    arrival_calls: int
    """It arrives once so many calls have been made."""
    prompt_ids: list[int]
    message: pb.Request
    """Without what the router adds: id, blocks, slots."""
    leaves_after_tokens: int | None = None
    """When its client goes away; 0 is while it still queues."""
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    final: pb.GeneratedText | None = None
    ending: Ending | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_new_tokens(self) -> int:
        return self.message.stopping_parameters.max_new_tokens

    def take(self, generation: pb.Generation) -> bool:
        """Returns whether this was the end of it."""
        tokens = generation.tokens
        assert len(tokens.ids) == len(tokens.texts) == len(tokens.logprobs) == len(tokens.is_special) == 1
        self.ids += tokens.ids
        self.texts += tokens.texts
        if generation.HasField("generated_text"):
            self.final, self.ending = generation.generated_text, Ending.FINISHED
        elif self.leaves_after_tokens is not None and len(self.ids) >= self.leaves_after_tokens:
            self.ending = Ending.LEFT
        return self.ending is not None


@dataclass(frozen=True, slots=True)
class RouterLimits:
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    """Used where the server does not say what its cache holds."""
    max_batch_size: int


class Router:
    """Turns streams into calls, and asserts of every answer what the real one takes for granted."""

    def __init__(self, channel: grpc.aio.Channel, limits: RouterLimits, streams: list[Stream]) -> None:
        self._stub = TextGenerationServiceStub(channel)
        self._limits = limits
        self._arriving = deque(sorted(streams, key=lambda stream: stream.arrival_calls))
        self._queue: deque[Stream] = deque()
        self._entries: dict[int, Stream] = {}
        self._free_blocks: list[int] | None = None
        self._max_batch_total_tokens = limits.max_batch_total_tokens
        self._next_request_id = self._next_batch_id = 0
        self.num_calls = 0
        self.num_filtered = 0
        self.failed_calls: Counter[str] = Counter()
        """By the code that the server answered."""
        self.num_mixed_prefills = 0
        """Prefills that stepped a running batch along."""

    async def start(self) -> None:
        """What a router does before its first batch."""
        await self._stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
        await self._stub.ClearCache(pb.ClearCacheRequest())
        self._info: pb.InfoResponse = await self._stub.Info(pb.InfoRequest())
        limits = self._limits
        answer = await self._stub.Warmup(
            pb.WarmupRequest(
                batch=pb.Batch(size=1, requests=[pb.Request(inputs="_test ", truncate=limits.max_input_tokens)]),
                max_input_tokens=limits.max_input_tokens,
                max_prefill_tokens=limits.max_batch_prefill_tokens,
                max_total_tokens=limits.max_total_tokens,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        assert answer.max_input_tokens == limits.max_input_tokens
        assert answer.max_total_tokens == limits.max_total_tokens
        assert answer.HasField("max_supported_total_tokens") != self._info.requires_padding
        if not self._info.requires_padding:
            self._max_batch_total_tokens = answer.max_supported_total_tokens
            self._free_blocks = list(range(self._max_batch_total_tokens // self._info.block_size))

    async def run(self) -> None:
        """Until every stream has ended."""
        while self._has_waiting(is_idle=True):
            running, waiting_calls = await self._prefill_next(None), 1
            while running is not None:
                min_size = None if waiting_calls >= MAX_WAITING_CALLS else int(running.size * WAITING_SERVED_RATIO)
                batches = [running]
                if self._is_new_batch_possible(running, min_size):
                    mixed = running if self._info.support_chunking else None
                    new = await self._prefill_next(running)
                    waiting_calls = 1
                    if mixed is not None:
                        batches = []
                    if new is not None:
                        batches.append(new)
                    elif mixed is not None:
                        break
                running = await self._step(
                    self._stub.Decode, pb.DecodeRequest(batches=batches), [b.id for b in batches]
                )
                waiting_calls += 1
            assert not self._entries, "these were still running when the loop ended, and are lost"

    def _has_waiting(self, is_idle: bool = False) -> bool:
        """Lets streams arrive, and forgets those that left the queue. An idle router's next one arrives at once."""
        while True:
            while self._queue and self._queue[0].leaves_after_tokens == 0:
                self._queue.popleft().ending = Ending.LEFT
            can_jump = is_idle and not self._queue
            if not self._arriving or not (can_jump or self._arriving[0].arrival_calls <= self.num_calls):
                return bool(self._queue)
            self._queue.append(self._arriving.popleft())

    def _is_new_batch_possible(self, running: pb.CachedBatch, min_size: int | None) -> bool:
        if not self._has_waiting() or len(self._queue) < (min_size or 0):
            return False
        return self._fits(self._queue[0], [], self._budgets(running))

    def _budgets(self, running: pb.CachedBatch | None) -> tuple[int, int, int]:
        """Prompt tokens, tokens, and requests that a new batch may have."""
        limits = self._limits
        if running is None:
            return limits.max_batch_prefill_tokens, self._max_batch_total_tokens, limits.max_batch_size
        prefill_tokens = limits.max_batch_prefill_tokens
        if self._info.support_chunking:
            prefill_tokens = max(0, prefill_tokens - running.current_tokens)
        return (
            prefill_tokens,
            max(0, self._max_batch_total_tokens - running.max_tokens),
            max(0, limits.max_batch_size - running.size),
        )

    def _fits(self, stream: Stream, batch: list[Stream], budgets: tuple[int, int, int]) -> bool:
        max_prefill_tokens, max_tokens, max_size = budgets
        prompts = [other.num_prompt_tokens for other in (*batch, stream)]
        num_prefill_tokens = len(prompts) * max(prompts) if self._info.requires_padding else sum(prompts)
        num_output_tokens = sum(other.max_new_tokens for other in (*batch, stream))
        if len(prompts) > max_size or num_prefill_tokens + num_output_tokens > max_tokens:
            return False
        if self._free_blocks is not None and self._num_blocks(stream) > len(self._free_blocks):
            return False
        if self._info.support_chunking:
            return sum(prompts[:-1]) < max_prefill_tokens
        return num_prefill_tokens <= max_prefill_tokens

    def _num_blocks(self, stream: Stream) -> int:
        return -(-(stream.num_prompt_tokens + stream.max_new_tokens) // self._info.block_size)

    async def _prefill_next(self, running: pb.CachedBatch | None) -> pb.CachedBatch | None:
        """Takes from the queue's front what fits and prefills it; with chunking, in one step with the running batch."""
        batch: list[Stream] = []
        budgets = self._budgets(running)
        while self._has_waiting() and self._fits(self._queue[0], batch, budgets):
            stream = self._queue.popleft()
            self._allocate(stream)
            batch.append(stream)
        assert batch, "a request can't be admitted although nothing runs: the server's limits contradict each other"
        message = self._to_batch(batch, budgets[0])
        mixed = running if self._info.support_chunking else None
        self.num_mixed_prefills += mixed is not None
        outside = {} if running is None or mixed is not None else dict(self._entries)
        self._entries |= dict(zip((request.id for request in message.requests), batch, strict=True))
        request = pb.PrefillRequest(batch=message, cached_batch=mixed)
        return await self._step(self._stub.Prefill, request, [message.id], outside)

    def _to_batch(self, streams: list[Stream], max_prefill_tokens: int) -> pb.Batch:
        batch = pb.Batch(id=self._next_batch_id, size=len(streams))
        self._next_batch_id += 1
        for stream in streams:
            request = batch.requests.add()
            request.CopyFrom(stream.message)
            request.id = self._next_request_id
            request.blocks.extend(stream.blocks)
            request.slots.extend(block * self._info.block_size for block in stream.blocks)
            self._next_request_id += 1
            if self._info.support_chunking and stream.num_prompt_tokens > max_prefill_tokens:
                request.chunk_len = max_prefill_tokens
            max_prefill_tokens -= stream.num_prompt_tokens
        batch.max_tokens = sum(stream.num_prompt_tokens + stream.max_new_tokens for stream in streams)
        batch.max_blocks = max(len(stream.blocks) for stream in streams)
        return batch

    def _allocate(self, stream: Stream) -> None:
        if self._free_blocks is not None:
            num_blocks = self._num_blocks(stream)
            stream.blocks = [self._free_blocks.pop() for _ in range(num_blocks)]

    async def _step(
        self, method: Callable[..., Any], request: Any, clear_ids: list[int], outside: dict[int, Stream] | None = None
    ) -> pb.CachedBatch | None:
        """Prefill or Decode, and what follows. `outside` are entries of a running batch that the call leaves alone."""
        outside = outside or {}
        self.num_calls += 1
        try:
            call = method(request, timeout=CALL_TIMEOUT_S)
            if self.num_calls % CALLS_BETWEEN_HEALTH == 0:
                await self._stub.Health(pb.HealthRequest(), timeout=HEALTH_TIMEOUT_S)
            answer = await call
        except grpc.aio.AioRpcError as error:
            self.failed_calls[error.code().name] += 1
            for batch_id in clear_ids:
                await self._stub.ClearCache(pb.ClearCacheRequest(id=batch_id))
            for request_id in [id_ for id_ in self._entries if id_ not in outside]:
                self._drop(request_id, Ending.FAILED)
            return None
        ended = self._take_generations(answer, outside)
        batch = self._check_batch(answer, ended, outside)
        return None if batch is None else await self._filter(batch)

    def _take_generations(self, answer: Any, outside: dict[int, Stream]) -> set[int]:
        """Returns the requests that the server has ended."""
        ended = set()
        for generation in answer.generations:
            request_id = generation.request_id
            assert request_id in self._entries, f"a generation for request {request_id}, which is dead"
            assert request_id not in outside, f"a generation for request {request_id}, which was not asked for"
            if self._entries[request_id].take(generation) and self._entries[request_id].final is not None:
                ended.add(request_id)
        return ended

    def _check_batch(self, answer: Any, ended: set[int], outside: dict[int, Stream]) -> pb.CachedBatch | None:
        """What the answer says of its batch must be what is known of it here; also of clients that have just left."""
        live = {id_: stream for id_, stream in self._entries.items() if id_ not in ended and id_ not in outside}
        assert answer.HasField("batch") == bool(live), "an answer without a batch ends the loop"
        for request_id, stream in list(self._entries.items()):
            if stream.ending is not None:
                self._drop(request_id, stream.ending)
        if not live:
            return None
        batch: pb.CachedBatch = answer.batch
        self._check_counts(batch, live)
        return batch

    def _check_counts(self, batch: pb.CachedBatch, live: dict[int, Stream]) -> None:
        assert set(batch.request_ids) == set(live)
        assert batch.size == len(batch.request_ids) == len(live)
        assert batch.current_tokens == sum(1 if s.ids else s.num_prompt_tokens for s in live.values())
        prompts = [stream.num_prompt_tokens for stream in live.values()]
        outputs = [stream.max_new_tokens for stream in live.values()]
        if self._info.requires_padding:
            assert batch.max_tokens == len(live) * (max(prompts) + max(outputs))
        else:
            assert batch.max_tokens == sum(prompts) + sum(outputs)

    async def _filter(self, batch: pb.CachedBatch) -> pb.CachedBatch | None:
        """Drops what this router has dropped from the server's batch too."""
        kept = [request_id for request_id in batch.request_ids if request_id in self._entries]
        if len(kept) == batch.size:
            return batch
        self.num_filtered += 1
        if not kept:
            await self._stub.ClearCache(pb.ClearCacheRequest(id=batch.id))
            return None
        answer = await self._stub.FilterBatch(pb.FilterBatchRequest(batch_id=batch.id, request_ids=kept))
        assert answer.batch.id == batch.id
        self._check_counts(answer.batch, {request_id: self._entries[request_id] for request_id in kept})
        return answer.batch

    def _drop(self, request_id: int, ending: Ending) -> None:
        stream = self._entries.pop(request_id)
        stream.ending = ending
        if self._free_blocks is not None:
            self._free_blocks += stream.blocks
            stream.blocks = []


@pytest.fixture(scope="session")
def router_parts() -> SimpleNamespace:
    """The classes of this module."""
    return SimpleNamespace(Router=Router, RouterLimits=RouterLimits, Stream=Stream)
