"""Calls to the shards past the router, as the router makes them beside its own loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

from .deployment import Deployment

PROBE_ID = 2**64 - 1
"""Of the batch and of the request of every probe."""
_CALL_TIMEOUT_S = 60


class ShardConnections:
    """A gRPC connection to each shard's socket."""

    def __init__(self, deployment: Deployment) -> None:
        self._channels = [grpc.insecure_channel(f"unix:{path}") for path in deployment.shard_sockets]
        self._stubs: list[Any] = [TextGenerationServiceStub(channel) for channel in self._channels]

    def __enter__(self) -> ShardConnections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    async def probe(self) -> None:
        """The prompt that a router sends instead of a Health call after an error: to all shards at once.

        Raises AssertionError where no shard answers it, or more than one.
        """
        answers = await self._call_all("Prefill", _make_probe())
        assert [g.request_id for answer in answers for g in answer.generations] == [PROBE_ID]

    async def clear(self) -> None:
        """Drops every batch, so that the router's next call is for one that is not there."""
        await self._call_all("ClearCache", pb.ClearCacheRequest())

    async def _call_all(self, method: str, request: Any) -> list[Any]:
        calls = [asyncio.to_thread(getattr(stub, method), request, timeout=_CALL_TIMEOUT_S) for stub in self._stubs]
        return list(await asyncio.gather(*calls))


def _make_probe() -> pb.PrefillRequest:
    request = pb.Request(
        id=PROBE_ID,
        inputs="liveness",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
        truncate=1,
        add_special_tokens=True,
        blocks=[0],
        slots=list(range(16)),
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
    )
    return pb.PrefillRequest(batch=pb.Batch(id=PROBE_ID, requests=[request], size=1, max_tokens=2, max_blocks=1))
