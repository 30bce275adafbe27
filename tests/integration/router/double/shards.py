"""The router's connections: each call goes to all shards at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

from ..recordings.calls import Call

CALL_TIMEOUT_S = 60.0
"""The real router waits for ever; a call that takes so long is a stall."""

_CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


class CallError(Exception):
    """A call failed on some shard."""


class StalledError(Exception):
    """Nothing goes on, although it must."""


class Shards:
    """All shards of one server.

    Args:
        target: of the first shard, as gRPC writes it.
        delay_s: how long a call to a rank is held back; by default not at all. Two calls that go out together reach two
            shards in no order.
    """

    def __init__(self, target: str, delay_s: Callable[[int], float] = lambda rank: 0.0) -> None:
        self.calls: list[Call] = []
        self.delay_s = delay_s
        self._started_s = time.monotonic()
        self._channels = [grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS)]
        self._stubs = [TextGenerationServiceStub(self._channels[0])]

    async def close(self) -> None:
        """Ends the connections, and calls that are on their way."""
        for channel in self._channels:
            await channel.close()

    async def discover(self) -> None:
        """Connects to all shards that the first one names."""
        answer = (await self._call_all("ServiceDiscovery", pb.ServiceDiscoveryRequest()))[-1]
        for url in answer.urls[1:]:
            self._channels.append(grpc.aio.insecure_channel(url.replace("unix://", "unix:"), _CHANNEL_OPTIONS))
            self._stubs.append(TextGenerationServiceStub(self._channels[-1]))

    async def info(self) -> pb.InfoResponse:
        return (await self._call_all("Info", pb.InfoRequest()))[-1]

    async def health(self) -> None:
        await self._call_all("Health", pb.HealthRequest())

    async def clear_cache(self, batch_id: int | None) -> None:
        await self._call_all("ClearCache", pb.ClearCacheRequest(id=batch_id))

    async def filter_batch(self, batch_id: int, request_ids: list[int]) -> pb.CachedBatch | None:
        answer = (
            await self._call_all("FilterBatch", pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids))
        )[-1]
        return answer.batch if answer.HasField("batch") else None

    async def warm_up(self, request: pb.WarmupRequest) -> tuple[int | None, int, int]:
        """Returns the least of what the shards told: tokens of the cache, or None, and lengths of input and total."""
        answers = await self._call_all("Warmup", request)
        least = min(answers, key=lambda a: (a.max_supported_total_tokens, a.max_input_tokens, a.max_total_tokens))
        supported = least.max_supported_total_tokens if least.HasField("max_supported_total_tokens") else None
        return supported, least.max_input_tokens, least.max_total_tokens

    async def step(self, method: str, request: Any) -> tuple[list[pb.Generation], pb.CachedBatch | None]:
        """Prefill or Decode: generations of all shards together, the batch of the last."""
        answers = await self._call_all(method, request)
        ordered = [answers[-1], *answers[:-1]]
        generations = [generation for answer in ordered for generation in answer.generations]
        return generations, answers[-1].batch if answers[-1].HasField("batch") else None

    async def _call_all(self, method: str, request: Any) -> list[Any]:
        """Raises CallError with the first error in the order of ranks, once all have answered."""
        calls = (self._call(rank, method, request) for rank in range(len(self._stubs)))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _call(self, rank: int, method: str, request: Any) -> Any:
        begin_ms = self._now_ms()
        if delay_s := self.delay_s(rank):
            await asyncio.sleep(delay_s)
        answer = error = None
        try:
            answer = await getattr(self._stubs[rank], method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StalledError(f"{method} got no answer of rank {rank} for {CALL_TIMEOUT_S} s") from failure
            raise CallError(error) from failure
        finally:
            self.calls.append(Call(begin_ms, self._now_ms(), rank, method, request, answer, error))
        return answer

    def _now_ms(self) -> float:
        return (time.monotonic() - self._started_s) * 1000
