"""The service on one of several shards: its calls, drain and clean-up, in the one order of all shards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from pagedkv.adapters.rpc.calls import Context
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.call_channel import CallChannel
from pagedkv.adapters.tgi.call_order import CallContext, Metadata, OrderedStepLoop, RunMethod
from pagedkv.adapters.tgi.following_order import FollowingOrder
from pagedkv.adapters.tgi.leading_order import LeadingOrder
from pagedkv.adapters.tgi.service import GenerationService
from pagedkv.plugin.distributed import ShardGroup
from pagedkv.plugin.interface import Capacity, WarmupLimits

_START_WARMUP = "StartWarmup"
_BEGIN_DRAIN = "BeginDrain"
_END_ABANDONED = "EndAbandoned"
_STOP = "Stop"
"""Calls that no client makes; their content is JSON."""

_WARMUP_TIMEOUT_S = 3600.0
"""How long a warm-up waits for rank 0, which may still load its weights."""
_STOP_GRACE_S = 15.0
"""How much longer than its own drain a shard waits for rank 0 to end it."""
_DRAIN_POLL_S = 0.02


class OrderedService:
    """Has the methods of `GenerationService` that change its state, run in the order that rank 0 decides.

    Args:
        service: of this shard; its step loop is `step_loop`.
        group: of all shards.
        on_drain: called when a drain begins, on every shard, whichever was asked for it.
    """

    def __init__(
        self, service: GenerationService, step_loop: OrderedStepLoop, group: ShardGroup, on_drain: Callable[[], None]
    ) -> None:
        self._service = service
        self._on_drain = on_drain
        self._has_begun_to_drain = asyncio.Event()
        self._has_drained: asyncio.Future[bool] | None = None
        self._leading: LeadingOrder | None = None
        self._following: FollowingOrder | None = None
        channel = CallChannel(group.call_connections, lambda rank: _report_loss(group, rank))
        if group.info.rank == 0:
            self._leading = LeadingOrder(
                channel, step_loop, group.fail_unless_reported, on_drain_asked=on_drain, clear_after=self._clear_after
            )
        else:
            self._following = FollowingOrder(channel, step_loop, group.fail_unless_reported, rank=group.info.rank)

    @property
    def _order(self) -> LeadingOrder | FollowingOrder:
        order = self._leading or self._following
        assert order is not None
        return order

    async def open(self) -> None:
        """Starts to run calls."""
        service = self._service
        self._has_drained = asyncio.get_running_loop().create_future()
        await self._order.open(
            {
                "Warmup": _parsed(pb.WarmupRequest, service.warmup),
                "ClearCache": _parsed(pb.ClearCacheRequest, service.clear_cache),
                "FilterBatch": _parsed(pb.FilterBatchRequest, service.filter_batch),
                "Prefill": _parsed(pb.PrefillRequest, service.prefill),
                "Decode": _parsed(pb.DecodeRequest, service.decode),
                _START_WARMUP: self._run_warmup,
                _BEGIN_DRAIN: self._run_begin_drain,
                _END_ABANDONED: self._run_end_abandoned,
                _STOP: self._run_stop,
            }
        )

    def close(self) -> None:
        """Leaves the order: calls that wait for rank 0 are refused. A second call does nothing."""
        self._order.close()

    async def info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return await self._service.info(request, context)

    async def service_discovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return await self._service.service_discovery(request, context)

    async def health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        return await self._service.health(request, context)

    async def warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        response: pb.WarmupResponse = await self._call("Warmup", request, context)
        return response

    async def clear_cache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        response: pb.ClearCacheResponse = await self._call("ClearCache", request, context)
        return response

    async def filter_batch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        response: pb.FilterBatchResponse = await self._call("FilterBatch", request, context)
        return response

    async def prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        response: pb.PrefillResponse = await self._call("Prefill", request, context)
        return response

    async def decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        response: pb.DecodeResponse = await self._call("Decode", request, context)
        return response

    async def warm_up(self, limits: WarmupLimits) -> Capacity:
        """As `GenerationService.warm_up`, on all shards. Every shard calls it, with the same limits."""
        content = json.dumps(asdict(limits)).encode()
        if self._leading:
            capacity, _ = await self._leading.call(_START_WARMUP, content, ())
        else:
            assert self._following
            capacity, _ = await self._following.call(_START_WARMUP, content, (), _WARMUP_TIMEOUT_S)
        assert isinstance(capacity, Capacity)
        return capacity

    async def end_abandoned(self) -> None:
        """Ends, on all shards, the batches that are abandoned by the clock of rank 0."""
        if self._leading and (abandoned := self._service.find_abandoned()):
            self._leading.begin(_END_ABANDONED, json.dumps(abandoned).encode())

    async def begin_drain(self) -> None:
        """Begins the drain of all shards; returns when it has begun here."""
        if self._leading and not self._has_begun_to_drain.is_set():
            self._leading.begin(_BEGIN_DRAIN, b"")
        elif self._following:
            self._following.ask_for_drain()
        with suppress(asyncio.TimeoutError):  # Rank 0 hangs; how long this shard drains is bounded all the same.
            await asyncio.wait_for(self._has_begun_to_drain.wait(), _STOP_GRACE_S)

    async def wait_until_drained(self, timeout_s: float) -> bool:
        """Waits until rank 0 finds all requests ended, or its time over; no step runs on any shard after this.

        Returns:
            Whether all requests ended in time; the same on all shards.
        """
        if self._leading:
            deadline_s = time.monotonic() + timeout_s
            while self._service.num_requests and time.monotonic() < deadline_s:
                await asyncio.sleep(_DRAIN_POLL_S)
            has_drained = not self._service.num_requests
            self._leading.begin(_STOP, json.dumps(has_drained).encode())
            self._leading.stop()
            return has_drained
        assert self._has_drained is not None
        try:
            return await asyncio.wait_for(asyncio.shield(self._has_drained), timeout_s + _STOP_GRACE_S)
        except asyncio.TimeoutError:
            return False

    async def _call(self, method: str, request: Message, context: Context) -> Any:
        content = request.SerializeToString(deterministic=True)
        metadata: Metadata = tuple(
            (key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)
        )
        if self._following and method == "Warmup":
            result, trailing = await self._following.call(method, content, metadata, _WARMUP_TIMEOUT_S)
        else:
            result, trailing = await self._order.call(method, content, metadata)
        if trailing:
            context.set_trailing_metadata(trailing)
        return result

    async def _run_warmup(self, content: bytes, context: CallContext) -> Capacity:
        return await self._service.warm_up(WarmupLimits(**json.loads(content)))

    async def _run_begin_drain(self, content: bytes, context: CallContext) -> None:
        self._service.begin_drain()
        self._has_begun_to_drain.set()
        self._on_drain()

    async def _run_end_abandoned(self, content: bytes, context: CallContext) -> None:
        await self._service.end_abandoned([(batch_id, step) for batch_id, step in json.loads(content)])

    async def _run_stop(self, content: bytes, context: CallContext) -> None:
        assert self._has_drained is not None
        self._has_drained.set_result(json.loads(content))

    def _clear_after(self, method: str, content: bytes, result: Any) -> None:
        """Ends the batches of a call whose client went away: it has lost tokens, and can't go on."""
        assert self._leading is not None
        for batch_id in _find_batches(method, content, result):
            self._leading.begin("ClearCache", pb.ClearCacheRequest(id=batch_id).SerializeToString())


def _parsed(kind: type[Message], method: Callable[..., Any]) -> RunMethod:
    async def run(content: bytes, context: CallContext) -> Any:
        return await method(kind.FromString(content), context)

    return run


def _find_batches(method: str, content: bytes, result: Any) -> list[int]:
    """Ids of the batches that are live after a Prefill or Decode."""
    if method not in ("Prefill", "Decode"):
        return []
    if result is not None:
        return [result.batch.id] if result.HasField("batch") else []
    if method == "Decode":
        return [batch.id for batch in pb.DecodeRequest.FromString(content).batches]
    request = pb.PrefillRequest.FromString(content)
    return [request.cached_batch.id] if request.HasField("cached_batch") else []


def _report_loss(group: ShardGroup, rank: int) -> None:
    """Ends all shards where the loss is not the consequence of a shard's end, which is reported by itself."""
    message = f"rank {group.info.rank} has lost the connection over which it has one order of calls with rank {rank}"
    threading.Thread(target=group.fail_unless_reported, args=(message,), name="pagedkv-lost-connection").start()
