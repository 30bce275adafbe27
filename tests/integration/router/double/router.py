"""The batching loop: streams to calls, one call at a time."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import asdict, replace

from pagedkv.adapters.tgi import generate_pb2 as pb

from ..recordings.calls import HttpEvent, Recording
from ..recordings.health_rules import PROBE
from .queue import Entry, NewBatch, Queue
from .shards import CallError, Shards, StalledError
from .start import Told, connect
from .streams import Stream
from .validation import Ask, InvalidAskError, RouterFlags, Tokenize, ValidRequest, validate


class RouterPanickedError(Exception):
    """The batching task is gone: no request is ever served again."""


class Router:
    """One router in front of one server; `start` first.

    The real one's loop runs by itself. Here each `turn` is one Prefill or Decode with what follows it, so that a test
    says what happens in between. Health checks are calls of their own, which may run beside a turn.

    Args:
        shards: connections of this router alone.
        tokenize: as the server's tokenizer does.
        seed: of the seeds that are chosen for clients.
    """

    def __init__(self, shards: Shards, tokenize: Tokenize, flags: RouterFlags, seed: int = 0) -> None:
        self.shards = shards
        self.flags = flags
        self.streams: list[Stream] = []
        self._tokenize = tokenize
        self._random = random.Random(seed)
        self._entries: dict[int, Entry] = {}
        self._running: pb.CachedBatch | None = None
        self._to_decode: list[pb.CachedBatch] = []
        """Set between a Prefill beside a running batch and the Decode that follows it."""
        self._waiting_tokens = 0
        self._is_well = True
        self._panic = ""
        self._recording = Recording("double", max_piece_tokens=flags.max_piece_tokens)

    async def start(self) -> Told:
        """What happens before the first request. Raises RouterEndsError where the real router would end."""
        self.begin(await connect(self.shards, self.flags))
        return self.told

    def begin(self, told: Told) -> None:
        """The loop's beginning, with an empty queue."""
        self.told = told
        self._queue = Queue(told.info, told.max_batch_total_tokens)

    def recording(self) -> Recording:
        """All calls so far."""
        given = asdict(self.flags)
        flags = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value is not None}
        calls = sorted(self.shards.calls, key=lambda call: call.begin_ms)
        return Recording("double", flags, calls, self._recording.events, self.flags.max_piece_tokens)

    def submit(self, ask: Ask) -> Stream:
        """A client's request enters the queue. Raises InvalidAskError for what the router refuses itself."""
        seed = self._random.getrandbits(64) or 1
        request = self._validate(ask, seed)
        # Every piece of the answer has the same seed.
        stream = Stream(replace(ask, seed=seed if ask.seed is None else ask.seed), request.max_total_new_tokens)
        self.streams.append(stream)
        self._recording.events.append(HttpEvent(0.0, "post", ask.body()))
        self._queue.append(request, stream)
        return stream

    async def turn(self) -> bool:
        """Makes the loop's next call. Returns whether there was one to make.

        Raises:
            RouterPanickedError: the real one's batching task would panic.
            StalledError: a request waits, nothing runs, and it is not admitted: nobody is served any more.
        """
        if self._panic:
            raise RouterPanickedError(self._panic)
        if self._to_decode:
            await self._decode(self._to_decode)
        elif self._running is None:
            return await self._begin()
        else:
            await self._go_on(self._running)
        return True

    async def run(self) -> None:
        """Turns until nobody waits or runs."""
        while await self.turn():
            pass

    async def health(self) -> bool:
        """What GET /health answers."""
        try:
            if self._is_well:
                await self.shards.health()
            else:
                await self.shards.step("Prefill", PROBE)
        except CallError:
            self._is_well = False
        else:
            self._is_well = True
        return self._is_well

    @property
    def next_id(self) -> int:
        """Of the next request that enters the queue."""
        return self._queue.next_id

    def doubt_health(self) -> None:
        """As after an error: the next health check is a Prefill."""
        self._is_well = False

    @property
    def running(self) -> list[tuple[pb.CachedBatch, list[Entry]]]:
        """The batches that the next call names, and who lives in them."""
        batches = self._to_decode or ([] if self._running is None else [self._running])
        return [(b, [self._entries[id_] for id_ in b.request_ids if id_ in self._entries]) for b in batches]

    def _validate(self, ask: Ask, seed: int) -> ValidRequest:
        return validate(ask, seed, self._tokenize, self.flags, (self.told.max_input_tokens, self.told.max_total_tokens))

    async def _begin(self) -> bool:
        flags = self.flags
        new = self._queue.next_batch(
            None, flags.max_batch_size, flags.max_batch_prefill_tokens, self.told.max_batch_total_tokens
        )
        if new is None:
            if self._queue.has_clients:
                raise StalledError("the front of the queue is not admitted although nothing runs")
            return False
        self._entries = new.entries
        self._running = await self._step(
            "Prefill", pb.PrefillRequest(batch=new.message), [new.message.id], self._entries
        )
        self._waiting_tokens = 1
        self._end_if_none_runs()
        return True

    async def _go_on(self, running: pb.CachedBatch) -> None:
        new = self._next_beside(running)
        if new is None:
            await self._decode([running])
            return
        self._waiting_tokens = 1
        if self.told.info.support_chunking:
            self._entries |= new.entries
            request = pb.PrefillRequest(batch=new.message, cached_batch=running)
            self._running = await self._step("Prefill", request, [new.message.id], self._entries)
            if self._running is None:
                self._end_if_none_runs()
            else:
                self._to_decode = [self._running]
            return
        request = pb.PrefillRequest(batch=new.message)
        joining = await self._step("Prefill", request, [new.message.id], new.entries)
        if joining is not None:
            self._entries |= new.entries
        self._lose(new.entries if joining is None else {})
        self._to_decode = [running] if joining is None else [running, joining]

    def _next_beside(self, running: pb.CachedBatch) -> NewBatch | None:
        flags = self.flags
        max_tokens = self.told.max_batch_total_tokens - running.max_tokens
        if self.told.info.support_chunking:
            max_prefill_tokens = flags.max_batch_prefill_tokens - running.current_tokens
            return self._queue.next_batch(None, None, max_prefill_tokens, max_tokens)
        is_over = self._waiting_tokens >= flags.max_waiting_tokens
        min_size = None if is_over else int(running.size * flags.waiting_served_ratio)
        max_size = None if flags.max_batch_size is None else max(0, flags.max_batch_size - running.size)
        return self._queue.next_batch(min_size, max_size, flags.max_batch_prefill_tokens, max_tokens)

    async def _decode(self, batches: list[pb.CachedBatch]) -> None:
        self._to_decode = []
        request = pb.DecodeRequest(batches=batches)
        self._running = await self._step("Decode", request, [batch.id for batch in batches], self._entries)
        self._waiting_tokens += 1
        self._end_if_none_runs()

    def _end_if_none_runs(self) -> None:
        """The loop begins anew, and forgets whom it still had."""
        if self._running is None:
            self._lose(self._entries)

    def _lose(self, entries: dict[int, Entry]) -> None:
        for entry in entries.values():
            entry.stream.lose()
            self._queue.release(entry)
        entries.clear()

    async def _step(
        self,
        method: str,
        request: pb.PrefillRequest | pb.DecodeRequest,
        clear_ids: list[int],
        entries: dict[int, Entry],
    ) -> pb.CachedBatch | None:
        """One call and what follows. Ended entries leave `entries`; after an error all do."""
        try:
            generations, batch = await self.shards.step(method, request)
        except CallError as error:
            for batch_id in clear_ids:
                with suppress(CallError):
                    await self.shards.clear_cache(batch_id)
            self._fail(entries, str(error))
            return None
        for generation in generations:
            self._send(generation, entries)
        return None if batch is None else await self._filter(batch, entries)

    def _fail(self, entries: dict[int, Entry], error: str) -> None:
        for entry in entries.values():
            if not entry.stream.is_gone:
                self._is_well = False
            entry.stream.fail(error)
            self._queue.release(entry)
        entries.clear()

    def _send(self, generation: pb.Generation, entries: dict[int, Entry]) -> None:
        entry = entries.get(generation.request_id)
        if entry is None:
            raise self._panicked(f"a generation for request {generation.request_id}, which is not live")
        if not entry.stream.is_gone:
            num_tokens = len(generation.tokens.ids)
            if num_tokens == 0:
                raise self._panicked(f"a generation without a token for request {entry.id}")
            entry.stream.take_tokens(generation)
            if not generation.HasField("generated_text"):
                return
            if entry.stream.wants_more(generation.generated_text):
                self._continue(entry.stream)
        del entries[entry.id]
        self._queue.release(entry)

    def _continue(self, stream: Stream) -> None:
        """The next piece is a new request, if it still fits."""
        try:
            request = self._validate(stream.ask, stream.ask.seed or 0)
        except InvalidAskError:
            stream.finish()
            return
        stream.num_pieces += 1
        self._queue.append(request, stream)

    async def _filter(self, batch: pb.CachedBatch, entries: dict[int, Entry]) -> pb.CachedBatch | None:
        if batch.size == len(entries):
            return batch
        kept = [request_id for request_id in batch.request_ids if request_id in entries]
        try:
            if kept:
                return await self.shards.filter_batch(batch.id, kept)
            await self.shards.clear_cache(batch.id)
        except CallError as error:
            raise self._panicked(f"after an answer, with {kept} to keep: {error}") from error
        return None

    def _panicked(self, reason: str) -> RouterPanickedError:
        self._panic = reason
        return RouterPanickedError(reason)
