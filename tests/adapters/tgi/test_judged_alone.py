"""Requests are judged alone: whatever a client sends beside running streams, no stream loses a token.

A router passes the running batch along with the new one, and ends everybody's answer when the call fails. So each kind
of request comes here as a router sends it, and the streams beside it are compared with what they are alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.plugin.errors import RequestError, StepError
from pagedkv.plugin.observer import Observers, Outcome, Refusal
from pagedkv.plugin.requests import SamplingParams

REGEX, JSON = pb.GRAMMAR_TYPE_REGEX, pb.GRAMMAR_TYPE_JSON
TOOLS = r'\{"function":[ ]?\{"_name":[ ]?"add".*\}'
IMAGE = pb.InputChunk(image=pb.Image(data=b"\x89PNG", mimetype="image/png"))
TEXT = pb.InputChunk(text="a")


def grammar(text: str, kind: int) -> dict[str, Any]:
    return {"parameters": {"grammar": text, "grammar_type": kind}}


SERVED: dict[str, dict[str, Any]] = {
    "the model's name as an adapter": {"adapter_id": "HuggingFaceTB/SmolLM2-135M-Instruct"},
    "an adapter that nobody has": {"adapter_id": "nobody/nothing"},
    "a temperature beyond 32 bits": {"parameters": {"temperature": math.inf, "do_sample": True}},
    "a repetition penalty beyond 32 bits": {"parameters": {"repetition_penalty": math.inf}},
    "a frequency penalty beyond 32 bits": {"parameters": {"frequency_penalty": math.inf}},
    "a chat's presence penalty of 0": {"parameters": {"repetition_penalty": 2.0, "do_sample": True}},
    "a text of 1.15 MB with truncate": {"text": "All work and no play. " * 52_000 + "a", "truncate": 100},
    "an image before the text": {"input_chunks": pb.Input(chunks=[IMAGE, TEXT])},
    "an output of no tokens": {"stopping_parameters": {"max_new_tokens": 0}},
    "an output a token too long": {"text": "a" * 253, "max_new_tokens": 4},
    "an endless output": {"stopping_parameters": {"max_new_tokens": 2**32 - 1, "stop_sequences": ["c"]}},
    "a prompt of one token with log-probabilities": {"prefill_logprobs": True},
}

REFUSED: dict[str, tuple[dict[str, Any], Refusal]] = {
    "tools, auto": (grammar(TOOLS, REGEX), Refusal.UNSUPPORTED),
    "tools, required": (grammar(TOOLS + "|x", REGEX), Refusal.UNSUPPORTED),
    "response_format json": (grammar(r'\{"name":"[a-z]*"\}', REGEX), Refusal.UNSUPPORTED),
    "response_format regex": (grammar("[0-9]{3}", REGEX), Refusal.UNSUPPORTED),
    "a grammar of json": (grammar('{"type": "object"}', JSON), Refusal.UNSUPPORTED),
    "an invalid regex": (grammar("[0-9", REGEX), Refusal.UNSUPPORTED),
    "no text": ({"text": ""}, Refusal.INVALID),
    "an image alone": ({"input_chunks": pb.Input(chunks=[IMAGE])}, Refusal.INVALID),
    "a truncation to nothing": ({"truncate": 0}, Refusal.INVALID),
    "a temperature of 0": ({"parameters": {"temperature": 0.0}}, Refusal.INVALID),
    "no numbers": ({"parameters": {"temperature": math.nan}}, Refusal.INVALID),
    "top_p of 0": ({"parameters": {"top_p": 0.0}}, Refusal.INVALID),
    "a negative repetition penalty": ({"parameters": {"repetition_penalty": -1.0}}, Refusal.INVALID),
    "too many top tokens": ({"top_n_tokens": 60_000}, Refusal.INVALID),
    "a prompt that is too long": ({"text": "a" * 300}, Refusal.TOO_LONG),
}


class Heard:
    """What watchers are told."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.ends: dict[int, Outcome] = {}

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None: ...

    def on_end(self, end: Any) -> None:
        self.ends[end.request_id] = end.outcome

    def on_refusal(self, reason: Refusal, num_requests: int) -> None:
        self.refusals += [reason] * num_requests


class Streams:
    """Streams that run while other requests come."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire
        self.texts: dict[int, str] = {}
        self.ended: dict[int, pb.Generation] = {}
        forever = {"ignore_eos_token": True}
        requests = [wire.request(i, letter, 250, stopping_parameters=forever) for i, letter in ((1, "a"), (2, "k"))]
        self.take(wire.prefill(1, *requests))

    def take(self, response: pb.PrefillResponse | pb.DecodeResponse) -> None:
        self.batch = response.batch
        for generation in response.generations:
            self.texts[generation.request_id] = self.texts.get(generation.request_id, "") + generation.tokens.texts[0]
            if generation.HasField("generated_text"):
                self.ended[generation.request_id] = generation

    def run_beside(self, batch_id: int, request: pb.Request) -> pb.Generation:
        """The last answer to a request that comes as a router sends it."""
        self.take(self.wire.prefill(batch_id, request, running=self.batch))
        while request.id not in self.ended:
            self.take(self.wire.decode(self.batch))
        return self.ended[request.id]

    def finish(self) -> dict[int, str]:
        while self.batch.size:
            self.take(self.wire.decode(self.batch))
        return {i: self.texts[i] for i in (1, 2)}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def alone(make_backend: Any, make_tokenizer: Any, serving: Callable[..., Any], tmp_path: Any) -> dict[int, str]:
    """What the streams are with nobody beside them."""
    (folder := tmp_path / "alone").mkdir()
    with serving(make_backend(), make_tokenizer(), folder) as served:
        return Streams(served.wire).finish()


@pytest.fixture
def serve(backend: Any, make_tokenizer: Any, serving: Callable[..., Any], tmp_path: Any, heard: Heard) -> Any:
    return lambda **keys: serving(backend, make_tokenizer(), tmp_path, observers=Observers(requests=(heard,)), **keys)


def make_request(wire: Any, request_id: int, fields: dict[str, Any]) -> pb.Request:
    return wire.request(request_id, **{"text": "a", "max_new_tokens": 3, **fields})


def test_what_can_be_clamped_or_passed_over_is_served_beside_others(serve, alone, heard):
    with serve() as served:
        streams = Streams(served.wire)
        for i, (kind, fields) in enumerate(SERVED.items(), 100):
            generation = streams.run_beside(i, make_request(served.wire, i, fields))
            assert streams.texts[i].startswith("b"), kind
            assert generation.generated_text.finish_reason != pb.FINISH_REASON_EOS_TOKEN, kind
            served.wire.health()
        assert streams.finish() == alone
    assert heard.refusals == []


@pytest.mark.parametrize("refusal_text", ["reason", "empty"])
def test_what_can_not_be_done_ends_alone_in_its_first_answer(serve, alone, heard, caplog, refusal_text):
    with serve(refusal_text=refusal_text) as served:
        streams = Streams(served.wire)
        for i, (kind, (fields, reason)) in enumerate(REFUSED.items(), 100):
            caplog.clear()
            response = served.wire.prefill(i, make_request(served.wire, i, fields), running=streams.batch)
            streams.take(response)
            assert {generation.request_id for generation in response.generations} == {1, 2, i}, kind
            assert list(response.batch.request_ids) == [1, 2], kind
            final = streams.ended[i].generated_text
            assert (final.finish_reason, final.generated_tokens) == (pb.FINISH_REASON_EOS_TOKEN, 1), kind
            assert final.text.startswith("The request was refused: ") == (refusal_text == "reason"), kind
            assert list(streams.ended[i].tokens.texts) == [final.text]
            assert list(streams.ended[i].tokens.is_special) == [refusal_text == "empty"]
            assert heard.refusals[-1] is reason, kind
            warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert [text for text in warnings if f"request {i} is refused ({reason.value})" in text], kind
            served.wire.health()
        assert streams.finish() == alone
    assert len(heard.refusals) == len(REFUSED)


def test_a_batch_of_good_and_bad_requests_serves_the_good_ones(serve, alone):
    with serve() as served:
        wire = served.wire
        streams = Streams(wire)
        bad = [make_request(wire, i, fields) for i, (fields, _) in enumerate(REFUSED.values(), 200)]
        good = [wire.request(i, "a", 3) for i in range(100, 104)]
        mixed = [request for pair in zip(bad, good, strict=False) for request in pair] + bad[len(good) :]
        response = wire.prefill(50, *mixed, running=streams.batch)
        assert list(response.batch.request_ids) == [1, 2, 100, 101, 102, 103]
        streams.take(response)
        assert streams.finish() == alone
        assert {i: streams.texts[i] for i in range(100, 104)} == dict.fromkeys(range(100, 104), "bcd")
        assert all("refused" in streams.texts[request.id] for request in bad)


def test_of_several_shards_one_tells_of_a_refused_request(make_backend, make_tokenizer, serving, tmp_path):
    told = []
    for rank in range(2):
        with serving(make_backend(), make_tokenizer(), tmp_path, rank=rank, num_shards=2) as served:
            wire = served.wire
            running = wire.prefill(1, wire.request(1, "a"), wire.request(2, "a")).batch
            new = [wire.request(3, ""), wire.request(4, "a"), wire.request(5, "")]
            response = wire.prefill(2, *new, running=running)
            assert list(response.batch.request_ids) == [1, 2, 4]
            told.append({generation.request_id for generation in response.generations})
            wire.clear()
    assert told == [{1, 3, 5}, {2, 4}]


def test_a_request_whose_text_can_not_be_decoded_ends_alone(
    make_backend, make_tokenizer, serving, tmp_path, heard, alone
):
    class BrokenTokenizer(make_tokenizer):
        def decode(self, token_ids, skip_special_tokens=False):
            text = super().decode(token_ids, skip_special_tokens)
            if "67" in text:
                raise RuntimeError("a secret of the tokenizer")
            return text.replace("=", "\ud800")  # no UTF-8 can hold it

    with serving(make_backend(), BrokenTokenizer(), tmp_path, observers=Observers(requests=(heard,))) as served:
        wire = served.wire
        streams = Streams(wire)
        raising = streams.run_beside(10, wire.request(10, "3", 20)).generated_text.text
        unsendable = streams.run_beside(11, wire.request(11, ":", 20)).generated_text.text
        assert "secret" not in raising
        assert "The request failed: internal error" in raising
        assert "The request failed: internal error" in unsendable
        refused = streams.run_beside(12, wire.request(12, "1678", 20)).generated_text.text
        assert refused.startswith("The request was refused: internal error")
        assert streams.finish()[1].startswith(alone[1][:20])
    assert heard.ends[10] is heard.ends[11] is Outcome.FAILED
    assert heard.refusals == [Refusal.FAILED]


def test_a_request_whose_scores_are_no_numbers_ends_alone(make_backend, make_tokenizer, serving, tmp_path, alone):
    class NanBackend(make_backend):
        def step(self, only=None):
            outputs = super().step(only)
            for i, output in enumerate(outputs):
                if output.request_id == 10 and output.token.token_id == ord("d") + 2:
                    outputs[i] = type(output)(
                        **{name: getattr(output, name) for name in output.__slots__}
                        | {"token": type(output.token)(output.token.token_id, math.nan)}
                    )
            return outputs

    with serving(NanBackend(), make_tokenizer(), tmp_path) as served:
        streams = Streams(served.wire)
        text = streams.run_beside(10, served.wire.request(10, "a", 20)).generated_text.text
        assert text == "bc\n\nThe request failed: the model's scores for the next token are no numbers"
        assert streams.finish() == alone
        assert not served.backend.requests


def test_a_step_that_fails_for_one_request_ends_it_alone(serve, backend, alone, heard):
    def fail(ids):
        if 10 in ids:
            backend.abort([10])
            raise StepError("out of luck", [10])

    with serve() as served:
        streams = Streams(served.wire)
        backend.before_step = fail
        text = streams.run_beside(10, served.wire.request(10, "a", 20)).generated_text.text
        assert text == "The request failed: out of luck"
        assert streams.finish() == alone
    assert heard.ends[10] is Outcome.FAILED


class TestOwnClient:
    """Our own client talks to the server alone, and raises what a status would have said."""

    async def generate(self, target: str, prompt: str, params: SamplingParams) -> None:
        async with GenerationClient(target) as client:
            async for _ in client.generate(prompt, params):
                pass

    @pytest.mark.parametrize(("refusal_text", "word"), [("reason", "no text"), ("empty", "invalid")])
    def test_a_refused_request_raises(self, serve, refusal_text, word):
        with serve(refusal_text=refusal_text) as served, pytest.raises(RequestError, match=word):
            served.call(self.generate(served.target, "", SamplingParams(max_new_tokens=3)))


def test_in_a_drain_new_requests_beside_a_running_batch_end_alone_and_the_batch_goes_on(serve, alone, heard):
    with serve() as served:
        wire = served.wire
        streams = Streams(wire)
        served.server.service.begin_drain()
        with pytest.raises(grpc.RpcError):
            wire.health()
        for i in (10, 11):
            text = streams.run_beside(i, wire.request(i, "a", 5)).generated_text.text
            assert text == "The request was refused: the server is draining; send new requests elsewhere"
        code, _ = wire.refused(lambda: wire.prefill(12, wire.request(12, "a", 5)))
        assert code is grpc.StatusCode.UNAVAILABLE, "with no running batch to lose, a client is told to go elsewhere"
        assert streams.finish() == alone
        assert served.call(served.server.drain(5))
    assert heard.refusals == [Refusal.DRAINING] * 3
