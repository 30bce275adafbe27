"""Measures what a streamed token costs around the backend: `python integration/measure/micro/smg_stream.py [--json]`.

N streams at once on the SMG worker, over a backend that says a token for each of them at a steady pace and computes
nothing. Processor time of this process, a token, in microseconds:

- total: with gRPC and the socket; the client is a process of its own.
- worker: loop, hand-over to the event loop and messages alone, without gRPC.

Held against 40 µs, total, at 16 and 64 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import cast

import grpc
import torch

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.handlers import SERVICE_NAME, worker_handler
from pagedkv.adapters.smg.worker import SmgWorker, WorkerFacts
from pagedkv.integration.measure.micro.grpc_step import EchoBackend
from pagedkv.plugin.backend.stats import NO_CACHE, NO_SCHEDULER, make_stats
from pagedkv.plugin.interface import Capacity, Tokenizer
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.requests import FinishReason, Request, RequestId, StepOutput, TokenLogprob
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.step_thread import StepThread
from pagedkv.plugin.stats import BackendStats, Counters

STREAM_COUNTS = (1, 16, 64)
MAX_TOTAL_US = 40.0
STEP_S = 0.01
"""Of a step; the processor is free meanwhile, as it is for this process while a model computes."""
NUM_TOKENS = 300
NUM_REPETITIONS = 3


class PacedBackend(EchoBackend):
    """Says a token for each request every STEP_S, and ends after as many as were asked for."""

    def __init__(self) -> None:
        layer = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=32, v_head_dim=32)
        super().__init__(ModelSpec("Paced", torch.float32, (layer,), 50_000, 32, 8192, (0,), None, None), [0])
        self._left: dict[RequestId, int] = {}
        self._counters = Counters()

    def add(self, requests: Sequence[Request]) -> None:
        self._left.update((request.id, request.params.max_new_tokens) for request in requests)

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        time.sleep(STEP_S)
        outputs = []
        for request_id, num_left in list(self._left.items()):
            reason = FinishReason.LENGTH if num_left == 1 else None
            token = TokenLogprob(1 + num_left % 40_000, -0.5)
            outputs.append(StepOutput(request_id, token, (), None, 0, reason, None))
            self._left[request_id] = num_left - 1
            if reason:
                del self._left[request_id]
        self._counters.count_step(outputs, 0, len(outputs))
        return outputs

    def abort(self, ids: Collection[RequestId]) -> None:
        for request_id in ids:
            self._left.pop(request_id, None)

    def stats(self) -> BackendStats:
        return make_stats(self._counters, NO_CACHE, NO_SCHEDULER, 1, 16)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Medians of processor time a token, in microseconds."""

    num_streams: int
    total_us: float
    worker_us: float


async def measure(counts: Sequence[int] = STREAM_COUNTS, num_repetitions: int = NUM_REPETITIONS) -> list[TokenCost]:
    """Serves the paced backend and measures each number of streams."""
    thread = StepThread()
    backend = PacedBackend()
    loop = ServingLoop(backend, thread)
    facts = WorkerFacts(Path(), "paced", "", "", 256)
    tokenizer = cast("Tokenizer", None)  # nothing here has a stop string
    worker = SmgWorker(
        loop, backend.info, Capacity(2**20, 4096, 8192, 2**16), tokenizer, facts, find_fault=loop.find_fault
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((worker_handler(lambda: worker),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        costs = []
        for num_streams in counts:
            totals = [await _measure_total(port, num_streams) for _ in range(num_repetitions)]
            alone = [await _measure_worker(worker, num_streams) for _ in range(num_repetitions)]
            costs.append(TokenCost(num_streams, median(totals), median(alone)))
        return costs
    finally:
        await server.stop(grace=None)
        loop.close()
        thread.close()


async def _measure_total(port: int, num_streams: int) -> float:
    command = [sys.executable, __file__, "--client", str(port), str(num_streams)]
    client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    await client.stdout.readline()
    started_s = time.process_time()
    client.stdin.write(b"go\n")
    await client.stdin.drain()
    await client.stdout.readline()
    spent_s = time.process_time() - started_s
    await client.wait()
    return spent_s / (num_streams * NUM_TOKENS) * 1e6


async def _measure_worker(worker: SmgWorker, num_streams: int) -> float:
    async def read(number: int) -> None:
        context = cast("grpc.aio.ServicerContext[bytes, bytes]", _NoContext())
        await worker.generate(_request(f"alone-{number}"), context)

    started_s = time.process_time()
    await asyncio.gather(*map(read, range(num_streams)))
    return (time.process_time() - started_s) / (num_streams * NUM_TOKENS) * 1e6


class _NoContext:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: bytes) -> None:
        """Takes what gRPC would send."""


def _request(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        stream=True,
    )


async def _run_client(port: int, num_streams: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def read(number: int) -> None:
            call = channel.unary_stream(
                f"/{SERVICE_NAME}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=bytes,
            )(_request(f"{port}-{number}-{time.monotonic_ns()}"))
            async for _ in call:
                pass

        await asyncio.gather(*map(read, range(num_streams)))
    print("done", flush=True)


def main() -> int:
    """Returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Measures what a streamed token costs around the backend.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", nargs=2, type=int, metavar=("PORT", "STREAMS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(_run_client(*arguments.client))
        return 0
    costs = asyncio.run(measure())
    if arguments.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=1))
    else:
        for cost in costs:
            print(f"{cost.num_streams:3} streams: {cost.total_us:6.1f} µs a token, {cost.worker_us:6.1f} without gRPC")
    return int(any(cost.total_us > MAX_TOTAL_US for cost in costs if cost.num_streams >= 16))


if __name__ == "__main__":
    sys.exit(main())
