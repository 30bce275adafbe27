"""The log of KV events: numbered batches for gateways that route by prefix, and the state for those that come later."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.kv_events import StoredBlock

MAX_KEPT_BATCHES = 4096
"""For subscribers that come back; an older cursor begins anew with a snapshot."""
MAX_CHUNK_BLOCKS = 8192
"""Of a snapshot's batch: about 1 MiB with blocks of 16 tokens."""
_FLUSH_DELAY_S = 0.01
"""Within which events share a batch."""


class UnknownEventNumberError(PagedKVError):
    """A subscriber names a batch that this process has not sent, or no longer has."""


class EventGapError(PagedKVError):
    """A subscriber is too slow for the batches that are kept."""


class KvEventLog:
    """A `KVEventListener` whose batches any number of subscribers read, each at its own place.

    Args:
        block_size: tokens a block.
        first_number: of the first batch; None begins behind all numbers of processes that were here before.
    """

    def __init__(self, block_size: int, first_number: int | None = None) -> None:
        self._block_size = block_size
        self._before_first = (_number_of_now() if first_number is None else first_number) - 1
        self._event_loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._blocks: dict[bytes, StoredBlock] = {}
        self._pending: list[StoredBlock | bytes | None] = []
        """A block that was stored, the name of one that was removed, None for all that were."""
        self._batches: deque[bytes] = deque(maxlen=MAX_KEPT_BATCHES)
        """Serialized; the last one has the number `last_number`."""
        self.last_number = self._before_first
        self._num_events = 0
        self._news = asyncio.Event()

    @property
    def has_batches(self) -> bool:
        """Whether there was one yet."""
        return self.last_number > self._before_first

    def on_stored(self, block: StoredBlock) -> None:
        with self._lock:
            self._blocks[block.name] = block
            self._append(block)

    def on_removed(self, name: bytes) -> None:
        with self._lock:
            self._blocks.pop(name, None)
            self._append(name)

    def on_cleared(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._append(None)

    def can_resume(self, number: int) -> bool:
        """Whether everything after the batch of this number is still here. It never is for one of another process."""
        self._flush()
        return self.last_number - len(self._batches) <= number <= self.last_number

    def read(self, number: int) -> list[bytes]:
        """The batches after the one of this number, which must be resumable."""
        first = number - (self.last_number - len(self._batches))
        return [self._batches[index] for index in range(first, len(self._batches))]

    async def wait(self, number: int, timeout_s: float) -> None:
        """Returns when there is a batch after this number, or the time is over."""
        if self.last_number > number:
            return
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            return

    def snapshot(self) -> list[bytes]:
        """Batches that tell all that is findable now, parents before children. The last one has `last_number`."""
        with self._lock:
            self._flush_locked()
            blocks = list(_parents_first(self._blocks))
        chunks = [blocks[start : start + MAX_CHUNK_BLOCKS] for start in range(0, len(blocks), MAX_CHUNK_BLOCKS)] or [[]]
        if len(chunks) > self.last_number - self._before_first:
            # A number that no batch has, more than once or left out would be a fault to others.
            chunks = [blocks]
        if not self.has_batches:
            return []
        batches = []
        for index, chunk in enumerate(chunks):
            events = [pb.KvCacheEvent(cleared=pb.KvCacheCleared())] if index == 0 else []
            events += self._make_events(chunk)
            batch = pb.KvEventBatch(
                sequence_number=self.last_number - len(chunks) + 1 + index,
                timestamp=time.time(),
                events=events,
                snapshot=pb.KvSnapshotChunk(index=index, count=len(chunks), blocks=len(blocks)),
            )
            batches.append(batch.SerializeToString())
        return batches

    def _append(self, event: StoredBlock | bytes | None) -> None:
        self._pending.append(event)
        if len(self._pending) == 1:
            self._event_loop.call_soon_threadsafe(self._event_loop.call_later, _FLUSH_DELAY_S, self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._flush_locked()

    def _flush_locked(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self.last_number += 1
        batch = pb.KvEventBatch(
            sequence_number=self.last_number, timestamp=time.time(), events=self._make_events(pending)
        )
        self._batches.append(batch.SerializeToString())
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _make_events(self, changes: Sequence[StoredBlock | bytes | None]) -> list[pb.KvCacheEvent]:
        """Blocks that follow each other are one event, and so are removals."""
        events: list[pb.KvCacheEvent] = []
        last_name: bytes | None = None
        for change in changes:
            if isinstance(change, StoredBlock):
                if last_name is None or change.parent_name != last_name:
                    events.append(pb.KvCacheEvent(stored=_begin_stored(change)))
                events[-1].stored.blocks.add(
                    block_hash=to_hash(change.name), token_ids=change.token_ids, block_size=self._block_size
                )
                last_name = change.name
                continue
            last_name = None
            if change is None:
                events.append(pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            elif events and events[-1].WhichOneof("data") == "removed":
                events[-1].removed.block_hashes.append(to_hash(change))
            else:
                events.append(pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=[to_hash(change)])))
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
        return events


def _number_of_now() -> int:
    """A worker that restarts on its address must not take an old position for one of its own: far less than 2**20
    batches come in a second."""
    return int(time.time()) << 20


def to_hash(name: bytes) -> int:
    """64 bits of a block's name, signed: an identity, by which nothing is found."""
    return int.from_bytes(name[-8:], "little", signed=True)


def _begin_stored(block: StoredBlock) -> pb.KvBlocksStored:
    stored = pb.KvBlocksStored()
    if block.parent_name is not None:
        stored.parent_block_hash = to_hash(block.parent_name)
    if block.namespace.salt:
        stored.cache_salt = block.namespace.salt
    if block.namespace.adapter_id:
        stored.lora_name = block.namespace.adapter_id
    return stored


def _parents_first(blocks: dict[bytes, StoredBlock]) -> Iterator[StoredBlock]:
    """Those that a lookup can reach: a block whose parent is gone is never found."""
    told: set[bytes] = set()
    for block in blocks.values():
        chain = []
        current: StoredBlock | None = block
        while current is not None and current.name not in told:
            chain.append(current)
            if current.parent_name is None:
                break
            current = blocks.get(current.parent_name)
        if current is None:
            continue
        for one in reversed(chain):
            told.add(one.name)
            yield one
