"""A worker over a real socket, around the paged backend and a model without weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.handlers import SERVICE_NAME, worker_handler
from pagedkv.adapters.smg.kv_events import KvEventLog
from pagedkv.adapters.smg.worker import SmgWorker, WorkerFacts
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.observer import Observers, Refusal, RequestEnd
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.step_thread import StepThread

BLOCK_SIZE = 8
STREAMING = {
    "Generate": pb.GenerateResponse,
    "GetTokenizer": pb.GetTokenizerChunk,
    "SubscribeKvEvents": pb.KvEventBatch,
}


class LetterTokenizer:
    """One id a character; enough for a model of 97 tokens."""

    all_special_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(character) % 96 for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + token_id % 95) for token_id in token_ids)


class CountingObserver:
    """Keeps what requests a server's observers hear of."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.ends: list[RequestEnd] = []

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        """Not counted."""

    def on_end(self, end: RequestEnd) -> None:
        self.ends.append(end)

    def on_refusal(self, reason: Refusal, num_requests: int) -> None:
        self.refusals += [reason] * num_requests


@dataclass(frozen=True, slots=True)
class Wire:
    """Calls a worker as the gateway does."""

    channel: grpc.aio.Channel
    worker: SmgWorker
    backend: PagedBackend
    loop: ServingLoop
    model: TokenModel
    observer: CountingObserver

    def stream(self, method: str, request: Any, **call: Any) -> Any:
        return self.channel.unary_stream(
            f"/{SERVICE_NAME}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=STREAMING[method].FromString,
        )(request, **call)

    async def call(self, method: str, request: Any) -> Any:
        answer = getattr(pb, type(request).__name__.replace("Request", "Response"))
        return await self.channel.unary_unary(
            f"/{SERVICE_NAME}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )(request, timeout=60)

    async def generate(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        messages = [message async for message in self.stream("Generate", request, timeout=120)]
        ends = [message.complete.finish_reason for message in messages if message.HasField("complete")]
        assert set(ends) <= KNOWN_REASONS
        return messages

    async def rest_of(self, call: Any) -> list[Any]:
        """What is left of a stream that `read` was called on."""
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        return messages

    async def until_idle(self) -> None:
        for _ in range(2000):
            if not self.loop.num_live:
                break
            await asyncio.sleep(0.005)
        used = await asyncio.wrap_future(self.loop.run_on_thread(lambda: self.backend.stats().num_used_blocks))
        assert (self.loop.num_live, used) == (0, 0)


def ask(
    prompt_ids: Sequence[int], max_tokens: int | None = 8, *, request_id: str = "r", stream: bool = True, **params: Any
):
    chooser = {"temperature": 0.0, "n": 1, **params}
    if max_tokens is not None:
        chooser["max_tokens"] = max_tokens
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt_ids),
        sampling_params=pb.SamplingParams(**chooser),
        stream=stream,
    )


KNOWN_REASONS = {"stop", "length", "abort", "error"}
"""The gateway shows clients any other as it is."""


@dataclass(frozen=True, slots=True)
class Lab:
    folder: Path
    ask: Callable[..., pb.GenerateRequest] = ask

    @asynccontextmanager
    async def serve(self, num_blocks: int = 128, max_live_samples: int = 64, **scheduler: Any) -> AsyncIterator[Wire]:
        model = TokenModel()
        written = {
            "model": {"path": "none"},
            "cache": {"num_blocks": num_blocks, "block_size": BLOCK_SIZE},
            "limits": {"max_total_tokens": min(512, num_blocks * BLOCK_SIZE)},
            "scheduler": {"max_step_tokens": 64, "max_num_sequences": 16, **scheduler},
        }
        config = resolve_config(parse_config(written), model.spec)
        thread = StepThread()
        backend = PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))
        capacity = thread.run(lambda: backend.warmup(WarmupLimits()))
        observer = CountingObserver()
        observers = Observers(requests=(observer,))
        loop = ServingLoop(backend, thread, observers=observers, max_live_samples=max_live_samples)
        events = KvEventLog(BLOCK_SIZE)
        thread.run(lambda: backend.set_kv_event_listener(events))
        facts = WorkerFacts(self.folder, "tiny", "token", '{"temperature": 0.6}', 16)
        worker = SmgWorker(
            loop,
            backend.info,
            capacity,
            LetterTokenizer(),  # type: ignore[arg-type]
            facts,
            find_fault=loop.find_fault,
            observers=observers,
            events=events,
            cache=backend,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((worker_handler(lambda: worker),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Wire(channel, worker, backend, loop, model, observer)
        finally:
            worker.end_streams()
            await server.stop(grace=1)
            loop.close()
            thread.run(backend.check_integrity)
            thread.run(backend.close)
            thread.close()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run
