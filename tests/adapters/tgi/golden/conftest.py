"""Plays the recorded traces against a server with a real model, one server a backend for the whole session."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.assemble import assemble
from pagedkv.plugin.config import load_config
from pagedkv.plugin.interface import WarmupLimits

GOLDEN = Path(__file__).parents[3] / "golden"
NUM_BLOCKS = {"paged": 192, "contiguous": 2048}
"""Of 16 tokens, by backend. A contiguous cache needs room for the longest answer of every row of the largest batch."""
LOGPROB_TOLERANCE = 1e-3
MAX_TOTAL_TOKENS = 2048  # What the recorded warm-up asks for.


WARMUP_LIMITS = WarmupLimits(MAX_TOTAL_TOKENS - 1, MAX_TOTAL_TOKENS, max_prefill_tokens=512, max_batch_size=8)


class Stream:
    """All that came for one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.is_special: list[bool] = []
        self.top_tokens: list[pb.Tokens] = []
        self.prefill: pb.Tokens | None = None
        self.final: pb.GeneratedText | None = None

    def take(self, generation: pb.Generation) -> None:
        self.ids += generation.tokens.ids
        self.logprobs += generation.tokens.logprobs
        self.texts += generation.tokens.texts
        self.is_special += generation.tokens.is_special
        self.top_tokens += generation.top_tokens
        if generation.HasField("prefill_tokens"):
            self.prefill = generation.prefill_tokens
        if generation.HasField("generated_text"):
            self.final = generation.generated_text


class Golden:
    """Recorded calls, a server to play them to, and what to compare."""

    def __init__(self, served: SimpleNamespace, name: str) -> None:
        self.served = served
        self.wire = served.wire
        self.name = name

    @staticmethod
    def load(trace: str) -> list[dict[str, Any]]:
        return json.loads((GOLDEN / f"{trace}.json").read_text(encoding="utf-8"))["calls"]

    @staticmethod
    def request_of(call: dict[str, Any]) -> Any:
        return json_format.ParseDict(call["request"], getattr(pb, f"{call['method']}Request")())

    @staticmethod
    def recorded_answer(call: dict[str, Any]) -> Any:
        return json_format.ParseDict(call["response"], getattr(pb, f"{call['method']}Response")())

    def send(self, call: dict[str, Any]) -> Any:
        """The answer to a recorded call. Raises grpc.RpcError."""
        return getattr(self.wire.stub, call["method"])(self.request_of(call), timeout=120)

    def refused(self, call: dict[str, Any]) -> grpc.StatusCode:
        return self.wire.refused(lambda: self.send(call))[0]

    def recorded_streams(self, trace: str) -> dict[int, Stream]:
        """What the recorded server sent, by request id. Of traces in which an id names one request."""
        streams: dict[int, Stream] = {}
        for call in self.load(trace):
            if call["method"] in ("Prefill", "Decode"):
                for generation in self.recorded_answer(call).generations:
                    streams.setdefault(generation.request_id, Stream()).take(generation)
        return streams

    def run_to_end(self, request: pb.PrefillRequest) -> dict[int, Stream]:
        """Prefill, then Decode until all requests have ended; by request id."""
        streams = {message.id: Stream() for message in request.batch.requests}
        response = self.wire.stub.Prefill(request, timeout=120)
        while True:
            for generation in response.generations:
                streams[generation.request_id].take(generation)
            if not response.HasField("batch"):
                return streams
            response = self.wire.decode(response.batch)

    def run_trace(self, trace: str) -> dict[int, Stream]:
        """The first Prefill of a trace, run to its end."""
        return self.run_to_end(self.request_of(self.load(trace)[0]))

    def assert_close(self, recorded: list[float], found: list[float]) -> None:
        assert len(recorded) == len(found)
        for ours, theirs in zip(found, recorded, strict=True):
            assert math.isnan(ours) == math.isnan(theirs)
            assert math.isnan(ours) or abs(ours - theirs) <= LOGPROB_TOLERANCE

    def assert_same_tokens(self, recorded: pb.Tokens, found: pb.Tokens) -> None:
        assert list(found.ids) == list(recorded.ids)
        assert list(found.texts) == list(recorded.texts)
        assert list(found.is_special) == list(recorded.is_special)
        self.assert_close(list(recorded.logprobs), list(found.logprobs))

    def assert_same_stream(self, recorded: Stream, found: Stream) -> None:
        assert found.ids == recorded.ids
        assert found.texts == recorded.texts
        self.assert_close(recorded.logprobs, found.logprobs)
        assert found.final == recorded.final

    def assert_same_generation(self, recorded: pb.Generation, found: pb.Generation) -> None:
        assert found.request_id == recorded.request_id
        self.assert_same_tokens(recorded.tokens, found.tokens)
        assert found.HasField("prefill_tokens") == recorded.HasField("prefill_tokens")
        self.assert_same_tokens(recorded.prefill_tokens, found.prefill_tokens)
        assert len(found.top_tokens) == len(recorded.top_tokens)
        for recorded_top, found_top in zip(recorded.top_tokens, found.top_tokens, strict=True):
            self.assert_same_tokens(recorded_top, found_top)
        assert found.HasField("generated_text") == recorded.HasField("generated_text")
        assert found.generated_text == recorded.generated_text

    def warm_up(self) -> None:
        """Back to the limits that all traces but the start-up's are played under."""
        self.served.call(self.served.server.warm_up(WARMUP_LIMITS))

    def assert_idle(self) -> None:
        """Ends what a trace left running; nothing of it stays behind."""
        self.wire.clear()
        backend = self.served.backend
        assert not backend.has_unfinished()
        stats = backend.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        backend.check_integrity()
        self.wire.health()


@pytest.fixture(scope="session", params=list(NUM_BLOCKS))
def golden_server(
    request: pytest.FixtureRequest,
    serving: Callable[..., Any],
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Golden]:
    keys = {
        "backend": request.param,
        "model.path": str(demo_model),
        "model.dtype": "float32",
        "model.device": "cpu",
        "cache.num_blocks": NUM_BLOCKS[request.param],
        "limits.max_total_tokens": MAX_TOTAL_TOKENS,
        "scheduler.max_step_tokens": 512,
    }
    assembly = assemble(load_config(overrides=keys, environ={}))
    folder = tmp_path_factory.mktemp("golden")
    with serving(assembly.backend, assembly.tokenizer, folder, warmup_limits=WARMUP_LIMITS) as served:
        served.tokenizer = assembly.tokenizer
        yield Golden(served, request.param)
    assembly.backend.close()


@pytest.fixture
def golden(golden_server: Golden) -> Iterator[Golden]:
    yield golden_server
    golden_server.assert_idle()


@pytest.fixture(scope="session")
def float32_model(demo_model: Path) -> Any:
    """The model as its own library runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def logits_after(float32_model: Any) -> Callable[[list[int], list[int]], Any]:
    """`logits_after(prompt_ids, generated_ids)`: [len(generated_ids), vocab_size] float64, for each generated token the
    model's own logits from which it was chosen."""
    import torch

    @torch.inference_mode()
    def compute(prompt_ids: list[int], generated_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt_ids, *generated_ids[:-1]]])
        return float32_model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].double()

    return compute
