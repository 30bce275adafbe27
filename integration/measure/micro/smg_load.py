"""Loads an SMG worker over gRPC, without the gateway: `python integration/measure/micro/smg_load.py MODEL`.

Starts `pagedkv serve MODEL --protocol smg` and keeps N streams open: each asks anew as soon as it has its answer.
Prompts share no block. Prints the medians of TTFT and TPOT, and tokens a second, for each N: to be held against what a
tool for HTTP measures through the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.handlers import SERVICE_NAME
from pagedkv.integration.serve.child_process import child_server

NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 64
REQUESTS_PER_STREAM = 3
MIN_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Medians over the requests of one number of streams."""

    num_streams: int
    num_requests: int
    ttft_ms: float
    tpot_ms: float
    """Between the tokens after the first."""
    tokens_per_s: float


async def measure(target: str, stream_counts: Sequence[int], num_new_tokens: int = NUM_NEW_TOKENS) -> list[Load]:
    """Loads the worker at an address with each number of streams, one after the other."""
    numbers = itertools.count()
    async with grpc.aio.insecure_channel(target) as channel:
        await channel.channel_ready()
        call = channel.unary_stream(
            f"/{SERVICE_NAME}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

        async def ask() -> tuple[float, float]:
            number = next(numbers)
            prompt = [17 + (number * 131 + i) % 9000 for i in range(NUM_PROMPT_TOKENS)]
            request = pb.GenerateRequest(
                request_id=str(number),
                tokenized=pb.TokenizedInput(input_ids=prompt),
                sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True),
                stream=True,
            )
            start = time.perf_counter()
            times = [time.perf_counter() async for one in call(request) if one.HasField("chunk")]
            return times[0] - start, (times[-1] - times[0]) / max(1, num_new_tokens - 1)

        await ask()
        return [await _load(ask, num_streams, num_new_tokens) for num_streams in stream_counts]


async def _load(ask, num_streams: int, num_new_tokens: int) -> Load:  # type: ignore[no-untyped-def]
    num_requests = max(MIN_REQUESTS, REQUESTS_PER_STREAM * num_streams)
    left = iter(range(num_requests))
    found: list[tuple[float, float]] = []

    async def stream() -> None:
        found.extend([await ask() for _ in left])

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    seconds = time.perf_counter() - start
    ttft, tpot = (median(column) * 1e3 for column in zip(*found, strict=True))
    return Load(num_streams, num_requests, ttft, tpot, num_requests * num_new_tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads an SMG worker over gRPC, without the gateway.")
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams, with commas")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    counts = [int(one) for one in arguments.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="pagedkv-") as folder:
        command = [arguments.model, "--protocol", "smg", "--listen", "127.0.0.1:0"]
        with child_server(command, Path(folder, "log")) as server:
            loads = asyncio.run(measure(server.target, counts))
    if arguments.json:
        print(json.dumps([asdict(load) for load in loads], indent=2))
        return
    for one in loads:
        print(
            f"{one.num_streams:4} streams: TTFT {one.ttft_ms:7.1f} ms, TPOT {one.tpot_ms:6.2f} ms, "
            f"{one.tokens_per_s:7.1f} tokens/s ({one.num_requests} requests)"
        )


if __name__ == "__main__":
    main()
