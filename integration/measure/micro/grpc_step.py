"""What a step costs around the backend: `python integration/measure/micro/grpc_step.py [--json] [--model DIR]`.

A server on a Unix socket over a backend that answers at once, with real text and the model's own tokenizer; the client
is a process of its own. Of each Decode: parsing, hand-over to the step's thread and back, text of the new tokens and
encoding, all but the backend's step. Held against 1 ms at 32 sequences.

- server: from the call's arrival to the finished answer, as the server's own clock has it.
- text: of that, tokens to text and text to protobuf.
- round trip: as the client sees it, with gRPC itself and the socket both ways.

All figures are medians of NUM_STEPS steps, after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import grpc
import torch

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import KEEP_ALL_TOKENS
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.config import ServerSection, parse_config
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import BackendInfo, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.kv_dtypes import find_kv_dtype
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.requests import Request, RequestId, StepOutput, TokenLogprob
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_model_settings
from pagedkv.plugin.stats import BackendStats

if TYPE_CHECKING:
    from typing_extensions import Self

SEQUENCE_COUNTS = (1, 32, 128)
NUM_STEPS = 400
NUM_WARMUP_STEPS = 50
MAX_NEW_TOKENS = 100_000
MAX_SERVER_MS = {32: 1.0}
"""By number of sequences."""

TEXT = (
    "The quick brown fox jumps over the lazy dog, and Zoë's café in Kraków serves naïve jalapeño — "
    "für 3,50 €. 東京の天気は晴れ。 «Привет», сказал он 🙂.\n"
)
"""What the backend says: words, digits, and characters of several tokens."""


class EchoBackend:
    """Says the same text for ever, one token a step, at once."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, spec: ModelSpec, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._num_generated_tokens: dict[RequestId, int] = {}
        self.info = BackendInfo(
            backend="echo",
            model=spec,
            device=torch.device("cpu"),
            dtype=spec.dtype,
            kv_dtype=find_kv_dtype("fp32"),
            attention_kernels="none",
            block_size=16,
            requires_padding=False,
            can_chunk_prefill=True,
            has_prefix_cache=False,
        )

    @classmethod
    def create(cls, config: ResolvedConfig) -> Self:
        raise NotImplementedError("made directly, as it has no model")

    def warmup(self, limits: WarmupLimits) -> Capacity:
        return Capacity(2**20, MAX_NEW_TOKENS, 2 * MAX_NEW_TOKENS, 2**16)

    def add(self, requests: Sequence[Request]) -> None:
        self._num_generated_tokens.update((request.id, request.id * 7) for request in requests)

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        return [self._say(request_id) for request_id in (self._num_generated_tokens if only is None else only)]

    def _say(self, request_id: RequestId) -> StepOutput:
        count = self._num_generated_tokens[request_id]
        self._num_generated_tokens[request_id] = count + 1
        token = TokenLogprob(self._token_ids[count % len(self._token_ids)], -0.5)
        return StepOutput(request_id, token, (), None, 0, None, None)

    def abort(self, ids: Collection[RequestId]) -> None:
        for request_id in ids:
            self._num_generated_tokens.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._num_generated_tokens)

    def stats(self) -> BackendStats:
        raise NotImplementedError("nothing is cached")

    def check_integrity(self) -> None:
        """There is no bookkeeping."""

    def close(self) -> None:
        self._num_generated_tokens.clear()


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians in milliseconds, without the backend's step."""

    num_sequences: int
    server_ms: float
    text_ms: float
    round_trip_ms: float


def measure_as_client(target: str, num_sequences: int) -> StepCost:
    """Decodes a batch of its own on a server, and ends it."""
    with grpc.insecure_channel(target) as channel:
        stub = TextGenerationServiceStub(channel)
        requests = [_request(request_id) for request_id in range(num_sequences)]
        batch = stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests, size=num_sequences))).batch
        costs = []
        for _ in range(NUM_WARMUP_STEPS + NUM_STEPS):
            started_ns = time.perf_counter_ns()
            answer = stub.Decode(pb.DecodeRequest(batches=[batch]))
            round_trip_ns = time.perf_counter_ns() - started_ns
            assert len(answer.generations) == num_sequences
            costs.append((answer.total_ns - answer.forward_ns, answer.decode_ns, round_trip_ns - answer.forward_ns))
            batch = answer.batch
        stub.ClearCache(pb.ClearCacheRequest())
    server_ns, text_ns, round_trip_ns = (median(column) for column in zip(*costs[NUM_WARMUP_STEPS:], strict=True))
    return StepCost(num_sequences, server_ns / 1e6, text_ns / 1e6, round_trip_ns / 1e6)


def _request(request_id: int) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs="Say it again:",
        truncate=KEEP_ALL_TOKENS,
        add_special_tokens=True,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=MAX_NEW_TOKENS, ignore_eos_token=True),
    )


async def measure(spec: ModelSpec, tokenizer: Tokenizer, counts: Sequence[int] = SEQUENCE_COUNTS) -> list[StepCost]:
    """Runs the server here and a client process for each number of sequences."""
    backend = EchoBackend(spec, tokenizer.encode(TEXT, add_special_tokens=False))
    with tempfile.TemporaryDirectory() as folder:
        config = ServerSection(uds_path=str(Path(folder) / "socket"))
        async with GenerationServer(backend, tokenizer, config) as server:
            await server.warm_up(WarmupLimits())
            return [await _run_client(server.targets[0], count) for count in counts]


async def _run_client(target: str, num_sequences: int) -> StepCost:
    command = [sys.executable, __file__, "--client", target, "--sequences", str(num_sequences)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with code {process.returncode}")
    return StepCost(**json.loads(out))


def find_missed_bars(costs: Sequence[StepCost]) -> list[StepCost]:
    return [cost for cost in costs if cost.server_ms > MAX_SERVER_MS.get(cost.num_sequences, float("inf"))]


def _describe(cost: StepCost) -> str:
    max_ms = MAX_SERVER_MS.get(cost.num_sequences)
    bar = "" if max_ms is None else f" (bar {max_ms:g} ms: {'missed' if cost.server_ms > max_ms else 'met'})"
    return (
        f"{cost.num_sequences:4} sequences: server {cost.server_ms:.3f} ms{bar}, of which text {cost.text_ms:.3f} ms; "
        f"round trip {cost.round_trip_ms:.3f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--model", type=Path, help="whose tokenizer is used; the demo model's if left out")
    parser.add_argument("--client", metavar="TARGET", help=argparse.SUPPRESS)
    parser.add_argument("--sequences", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(asdict(measure_as_client(arguments.client, arguments.sequences))))
        return 0

    from pagedkv.integration.demo_model import ensure_demo_model

    settings = resolve_model_settings(parse_config({"model": {"path": str(arguments.model or ensure_demo_model())}}))
    adapter = load_plugin(MODELS, settings.adapter)
    costs = asyncio.run(measure(adapter.describe(settings), adapter.load_tokenizer(settings)))
    missed = find_missed_bars(costs)
    if arguments.json:
        print(json.dumps({"steps": [asdict(cost) for cost in costs], "is_met": not missed}))
    else:
        for cost in costs:
            print(_describe(cost))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
