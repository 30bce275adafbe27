"""SubscribeKvEvents: a gateway that follows knows what is findable, whenever it comes and however it left."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg import kv_events
from pagedkv.adapters.smg.kv_events import to_hash


class Gateway:
    """What a subscriber knows: blocks by hash, with the whole prefix of each."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.number = 0
        self.num_loads = 0

    def take(self, batch: pb.KvEventBatch) -> None:
        self.num_loads += batch.HasField("load")
        if batch.load.load_only:
            assert not batch.events
            assert batch.sequence_number == self.number
            return
        is_snapshot = batch.HasField("snapshot")
        # The first batch may have any number: those of one process follow each other.
        assert is_snapshot or self.number in (0, batch.sequence_number - 1)
        self.number = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.prefixes.clear()
            elif kind == "removed":
                for block_hash in event.removed.block_hashes:
                    del self.prefixes[block_hash]
            else:
                self._store(event.stored)

    def _store(self, stored: pb.KvBlocksStored) -> None:
        prefix = self.prefixes[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ()
        for block in stored.blocks:
            assert len(block.token_ids) == block.block_size == 8
            prefix += tuple(block.token_ids)
            assert block.block_hash not in self.prefixes
            self.prefixes[block.block_hash] = prefix

    async def follow(self, wire: Any, start: int, until: int) -> None:
        request = pb.SubscribeKvEventsRequest(start_sequence_number=start, load_records_before_first_batch=True)
        call = wire.stream("SubscribeKvEvents", request)
        while self.number < until:
            self.take(await asyncio.wait_for(call.read(), 30))
        call.cancel()


async def settle(wire: Any) -> int:
    """Waits until all events are in batches; the last one's number."""
    await wire.until_idle()
    await asyncio.sleep(0.05)
    wire.worker._events._flush()
    return int(wire.worker._events.last_number)


def findable(wire: Any) -> set[int]:
    cache = wire.backend._pool.cache
    return {to_hash(name) for name in cache._index._block_of}


def prompt(i: int, num_tokens: int = 40) -> list[int]:
    return [1 + (i * 13 + j * (i + 1)) % 95 for j in range(num_tokens)]


async def load(wire: Any, lab: Any, numbers: range) -> None:
    for i in numbers:
        await wire.generate(lab.ask(prompt(i), 4, ignore_eos=True, request_id=str(i)))


def test_a_subscriber_from_the_start_knows_exactly_what_is_findable(lab, run) -> None:
    async def play() -> None:
        async with lab.serve(num_blocks=32) as wire:
            gateway = Gateway()
            following = asyncio.create_task(gateway.follow(wire, 0, 2**63))
            await load(wire, lab, range(12))
            last = await settle(wire)
            while gateway.number < last:
                assert not following.done(), following.exception()
                await asyncio.sleep(0.01)
            following.cancel()
            assert gateway.prefixes.keys() == findable(wire)
            assert wire.backend.stats().evictions > 0
            assert all(prefix == tuple(prompt(11))[: len(prefix)] for prefix in list(gateway.prefixes.values())[-5:])
            assert gateway.num_loads > 0

    run(play())


@pytest.mark.parametrize("max_chunk_blocks", [3, 8192])
def test_one_that_comes_later_gets_the_state_first_parents_before_children(
    lab, run, monkeypatch, max_chunk_blocks: int
) -> None:
    monkeypatch.setattr(kv_events, "MAX_CHUNK_BLOCKS", max_chunk_blocks)

    async def play() -> None:
        async with lab.serve(num_blocks=32) as wire:
            await load(wire, lab, range(9))
            last = await settle(wire)
            gateway = Gateway()
            await gateway.follow(wire, 0, last)
            assert gateway.prefixes.keys() == findable(wire)
            await load(wire, lab, range(9, 12))
            await gateway.follow(wire, gateway.number, await settle(wire))
            assert gateway.prefixes.keys() == findable(wire)

    run(play())


async def code_of(wire: Any, start: int) -> grpc.StatusCode:
    call = wire.stream("SubscribeKvEvents", pb.SubscribeKvEventsRequest(start_sequence_number=start))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code()


def test_a_cursor_of_another_process_or_too_old_must_begin_anew(lab, run, monkeypatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT_BATCHES", 3)

    async def play() -> None:
        async with lab.serve() as wire:
            await load(wire, lab, range(3))
            last = await settle(wire)
            assert await code_of(wire, last + 1) is grpc.StatusCode.OUT_OF_RANGE
            for i in range(3, 9):
                await load(wire, lab, range(i, i + 1))
                await settle(wire)
            assert await code_of(wire, last) is grpc.StatusCode.OUT_OF_RANGE

    run(play())


def test_flush_is_refused_while_requests_run_and_told_afterwards(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("Generate", lab.ask(prompt(1), 400, ignore_eos=True), timeout=60)
            await call.read()
            refused = await wire.call("FlushCache", pb.FlushCacheRequest())
            assert not refused.success
            call.cancel()
            await wire.until_idle()
            assert findable(wire)
            assert (await wire.call("FlushCache", pb.FlushCacheRequest(timeout_s=1))).success
            gateway = Gateway()
            await gateway.follow(wire, 0, await settle(wire))
            assert gateway.prefixes == {}
            assert findable(wire) == set()
            again = await wire.generate(lab.ask(prompt(1), 2, request_id="again"))
            assert again[-1].complete.cached_tokens == 0

    run(play())


def test_load_records_come_before_any_event_where_the_gateway_takes_them(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            request = pb.SubscribeKvEventsRequest(load_records_before_first_batch=True)
            call = wire.stream("SubscribeKvEvents", request)
            record = await asyncio.wait_for(call.read(), 30)
            assert (record.sequence_number, record.load.load_only, record.load.max_running_requests) == (0, True, 16)
            call.cancel()

    run(play())


def test_streams_end_at_once_when_the_worker_drains(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("SubscribeKvEvents", pb.SubscribeKvEventsRequest())
            reading = asyncio.create_task(call.read())
            await asyncio.sleep(0.1)
            wire.worker.end_streams()
            assert await asyncio.wait_for(reading, 5) is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    run(play())


def test_numbers_begin_behind_those_of_a_process_that_was_here_before(run, monkeypatch) -> None:
    async def play() -> None:
        first = kv_events.KvEventLog(8)
        first.on_cleared()
        assert first.can_resume(first.last_number)
        later = kv_events.time.time() + 1
        monkeypatch.setattr(kv_events.time, "time", lambda: later)
        second = kv_events.KvEventLog(8)
        for _ in range(3):
            second.on_cleared()
            assert second.can_resume(second.last_number)
            assert not second.can_resume(first.last_number)

    run(play())


def test_a_position_is_refused_before_anything_is_sent(lab, run) -> None:
    """The gateway begins anew where a call is refused; where a stream breaks, it tries the same position again."""

    class Silent:
        async def send_initial_metadata(self, _: object) -> None:
            raise AssertionError("metadata were sent")

    async def play() -> None:
        async with lab.serve() as wire:
            request = pb.SubscribeKvEventsRequest(start_sequence_number=7)
            with pytest.raises(kv_events.UnknownEventNumberError):
                await wire.worker.subscribe_kv_events(request, Silent())

    run(play())
