"""What has broken servers before, through the launcher's command: reuse across tenants, shards of unequal memory, a
health check behind a long prompt, faulty requests, a second SIGTERM. The model is tiny, its numbers random."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb

TENANT = "x-tenant"
NUM_RUNNING = 10
NUM_PROMPT_TOKENS = 200
NUM_LONG_PROMPT_TOKENS = 12000
HEALTH_TIMEOUT_S = 1
CALL_TIMEOUT_S = 60

NewRequest = Callable[[int, str, int], pb.Request]


@pytest.fixture(scope="module")
def shard(launched: Callable[..., Any], tiny_model: Path) -> Iterator[Any]:
    """One server that these tests share."""
    variables = {
        "PAGEDKV_SERVER_CACHE_SALT_METADATA_KEY": TENANT,
        "PAGEDKV_CACHE_NUM_BLOCKS": "1024",
        "PAGEDKV_SCHEDULER_MAX_STEP_TOKENS": "16384",
        "MAX_TOTAL_TOKENS": "16384",
    }
    with launched(tiny_model, variables) as (started,):
        started.call("Warmup", pb.WarmupRequest(max_prefill_tokens=16384, max_total_tokens=16384))
        yield started


def _words(num_words: int, seed: int) -> str:
    """Each is a token."""
    return " ".join(["apple", "river", "stone", "cloud", "horse"][(seed + i * i) % 5] for i in range(num_words))


def _ask(
    shard: Any, message: pb.Request, metadata: Sequence[tuple[str, str]] = ()
) -> tuple[list[int], int, dict[str, int]]:
    """Runs one request to its end. Returns its tokens, the calls up to its first token, and the counts of cached
    prompt tokens that the server told."""
    batch = pb.Batch(id=message.id, requests=[message], size=1)
    response, call = shard.stub.Prefill.with_call(
        pb.PrefillRequest(batch=batch), metadata=metadata, timeout=CALL_TIMEOUT_S
    )
    tokens, num_calls, told = [], 1, list(call.trailing_metadata())
    while True:
        tokens += [token for generation in response.generations for token in generation.tokens.ids]
        if not response.HasField("batch"):
            break
        num_calls += not tokens
        response, call = shard.stub.Decode.with_call(pb.DecodeRequest(batches=[response.batch]), timeout=CALL_TIMEOUT_S)
        told += call.trailing_metadata()
    cached = {}
    for key, value in told:
        if key == "pagedkv-cached-tokens":
            request_id, _, count = value.partition("=")
            cached[request_id] = int(count)
    return tokens, num_calls, cached


def _read_cached_tokens(shard: Any, request_id: int) -> int:
    """Of a request that has ended, from the log."""
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for line in list(shard.lines):
            fields = json.loads(line)["record"]["extra"]
            if fields.get("request_id") == request_id and "cached_tokens" in fields:
                return int(fields["cached_tokens"])
        time.sleep(0.02)
    pytest.fail(f"the log has no line of request {request_id}")


def test_prompts_are_reused_within_a_tenant_and_never_across(shard: Any, new_request: NewRequest) -> None:
    """Tenants by the salt in a call's metadata; one has the name of an adapter, which no request gets unless it is
    loaded. Tokens are the same for all."""
    text = _words(100, seed=1)
    outcomes = []
    for request_id, tenant in enumerate(("a", "b", "", "a", "b", "", "some-adapter")):
        metadata = ((TENANT, tenant),) if tenant else ()
        tokens, _, told = _ask(shard, new_request(request_id, text, 3), metadata)
        assert told == {}  # where tenants share a server, nobody is told what others have asked
        outcomes.append((tokens, _read_cached_tokens(shard, request_id)))
    assert len({tuple(tokens) for tokens, _ in outcomes}) == 1
    hits = [cached for _, cached in outcomes]
    assert hits[:3] == [0, 0, 0]
    assert hits[3] == hits[4] >= 96
    assert hits[5:] == [0, 0], "a prompt without a tenant is private"
    adapted = new_request(9, text, 3)
    adapted.adapter_id = "some-adapter"
    assert _ask(shard, adapted, ((TENANT, "a"),))[0] == outcomes[0][0]


def test_health_is_answered_within_a_second_during_a_very_long_prefill(shard: Any, new_request: NewRequest) -> None:
    batch = pb.Batch(id=1, requests=[new_request(1, _words(NUM_LONG_PROMPT_TOKENS, seed=2), 1)], size=1)
    prefill = shard.stub.Prefill.future(pb.PrefillRequest(batch=batch), timeout=CALL_TIMEOUT_S)
    num_answers = 0
    while not prefill.done():
        shard.call("Health", pb.HealthRequest(), HEALTH_TIMEOUT_S)
        num_answers += not prefill.done()
        time.sleep(0.02)
    assert len(prefill.result().generations) == 1
    assert num_answers >= 3


def test_values_out_of_range_hurt_no_stream_beside_them(shard: Any, new_request: NewRequest) -> None:
    running = shard.prefill(1, "The capital of France is", 8)
    nan, negative = new_request(2, "x", 4), new_request(2, "x", 4)
    nan.parameters.temperature = float("nan")
    negative.parameters.repetition_penalty = -1
    for message, reason in ((nan, "temperature"), (negative, "repetition_penalty")):
        refused = shard.call("Prefill", pb.PrefillRequest(batch=pb.Batch(id=2, requests=[message], size=1)))
        assert not refused.HasField("batch")
        assert reason in refused.generations[0].generated_text.text
    not_utf8 = new_request(2, "PLACE", 4).SerializeToString().replace(b"PLACE", b"\xff\xfe\xff\xfe\xff")
    raw = pb.Batch(id=2, size=1).SerializeToString() + b"\x12" + bytes([len(not_utf8)]) + not_utf8
    prefill = shard.channel.unary_unary("/generate.v3.TextGenerationService/Prefill")
    code = shard.code_of(lambda: prefill(b"\x0a" + bytes([len(raw)]) + raw, timeout=CALL_TIMEOUT_S))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    num_tokens = 1
    while running.HasField("batch"):
        running = shard.call("Decode", pb.DecodeRequest(batches=[running.batch]))
        num_tokens += len(running.generations)
    assert num_tokens == 8
    assert shard.health_fault() == ""


def test_second_sigterm_ends_running_requests_and_the_server(launched: Callable[..., Any], tiny_model: Path) -> None:
    with launched(tiny_model, {"MAX_TOTAL_TOKENS": "2048"}) as (shard,):
        shard.call("Warmup", pb.WarmupRequest(max_prefill_tokens=2048, max_total_tokens=2048))
        _end_by_two_signals(shard)


def _end_by_two_signals(shard: Any) -> None:
    for request_id in range(NUM_RUNNING):
        shard.prefill(request_id, f"Story number {request_id}:", 500)
    shard.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while "draining" not in shard.health_fault():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert shard.process.poll() is None
    shard.process.send_signal(signal.SIGTERM)
    assert shard.process.wait(CALL_TIMEOUT_S) == 128 + signal.SIGTERM
    records = [json.loads(line) for line in shard.lines]
    assert "SIGTERM again: ending at once" in [record["text"] for record in records]
    assert shard.errors.read_text() == ""


def test_launcher_s_shards_of_unequal_memory_take_the_smaller_pool_and_evict_alike(
    launched: Callable[..., Any], tiny_model: Path, new_request: NewRequest
) -> None:
    """Each answers for its part of a batch, both in step. The first prompt fills the pool when the second comes."""
    variables = [
        {"PAGEDKV_CACHE_NUM_BLOCKS": num_blocks, "PAGEDKV_SCHEDULER_MAX_STEP_TOKENS": "64", "MAX_TOTAL_TOKENS": "288"}
        for num_blocks in ("40", "20")
    ]
    with launched(tiny_model, *variables) as shards, ThreadPoolExecutor(2) as threads:

        def call_all(method: str, request: Any) -> list[Any]:
            return list(threads.map(lambda shard: shard.call(method, request), shards))

        def ask_all(request_id: int, text: str) -> tuple[list[int], int]:
            """Tokens and cached prompt tokens of a request that both shards must run alike; shard 0 tells of it."""
            message = new_request(request_id, text, 2)
            (tokens, num_calls, cached), other = threads.map(lambda shard: _ask(shard, message), shards)
            assert (other[0], other[2]) == ([], {})
            assert num_calls == max(1, -(-(NUM_PROMPT_TOKENS - cached[str(request_id)]) // 64))
            return tokens, cached[str(request_id)]

        urls = [f"unix://{shard.socket_path}" for shard in shards]
        assert list(shards[0].call("ServiceDiscovery", pb.ServiceDiscoveryRequest()).urls) == urls
        warmups = call_all("Warmup", pb.WarmupRequest(max_prefill_tokens=64))
        assert warmups[0] == warmups[1]
        assert warmups[0].max_supported_total_tokens == 21 * 16, "the router keeps one block back"
        first, second = _words(NUM_PROMPT_TOKENS, seed=3), _words(NUM_PROMPT_TOKENS, seed=4)
        found = {name: ask_all(index, text) for index, (name, text) in enumerate([("first", first), ("again", first)])}
        assert found["again"][0] == found["first"][0]
        assert (found["first"][1], found["again"][1] >= 192) == (0, True)
        assert ask_all(2, second)[1] == 0
        tokens, num_cached = ask_all(3, first)
        assert (tokens, num_cached < 192) == (found["first"][0], True)
        requests = [new_request(request_id, f"Story number {request_id}:", 3) for request_id in range(5)]
        answers = call_all("Prefill", pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests, size=5)))
        for _ in range(2):
            assert answers[0].batch == answers[1].batch
            assert [[g.request_id for g in answer.generations] for answer in answers] == [[0, 2, 4], [1, 3]]
            answers = call_all("Decode", pb.DecodeRequest(batches=[answers[0].batch]))
        assert all(g.generated_text.generated_tokens == 3 for answer in answers for g in answer.generations)
        assert not any(answer.HasField("batch") for answer in answers)
        for shard in shards:
            shard.process.send_signal(signal.SIGTERM)
        assert [shard.process.wait(CALL_TIMEOUT_S) for shard in shards] == [0, 0]
