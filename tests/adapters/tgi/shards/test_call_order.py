"""Calls that reach shards at other times, not all of them, or not for long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb

from .shard_client import Host, Shards, expected_tokens, finish, make_prefill, make_request

LATE_S = 0.1


@pytest.fixture(scope="module")
def shards(host: Host) -> Any:
    """Two shards that end well, however they are treated."""
    with host.running(max_delay_s=0.01) as shards:
        yield shards
    host.check_good_end()


def _check_service(shards: Shards, first_id: int) -> None:
    """A request runs, and nothing of others is left behind."""
    texts = {first_id: "what comes", first_id + 1: "after it?"}
    prefill = make_prefill(first_id, [make_request(id_, text, 5) for id_, text in texts.items()])
    assert finish(shards, shards.call("Prefill", prefill)) == {
        id_: expected_tokens(text, 5) for id_, text in texts.items()
    }


def _codes(answers: list[Any]) -> list[grpc.StatusCode]:
    return [answer.code() for answer in answers]


@pytest.mark.parametrize("delays_s", [(0, LATE_S), (LATE_S, 0)], ids=["first on rank 0", "first on rank 1"])
def test_calls_that_overtake_one_another_have_one_order(shards: Shards, delays_s) -> None:
    """Two batches at once, each on other shards first."""
    texts = {10: "one of them", 20: "and the other one"}

    def run(request_id: int) -> dict[int, list[int]]:
        delays = delays_s if request_id == 10 else delays_s[::-1]
        prefill = make_prefill(request_id, [make_request(request_id, texts[request_id], 12)])
        return finish(shards, shards.call("Prefill", prefill, delays), delays)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, texts)
    assert first | second == {id_: expected_tokens(text, 12) for id_, text in texts.items()}


def test_call_on_another_rank_alone_is_refused_after_a_while(shards: Shards) -> None:
    (answer,) = shards.call("Prefill", make_prefill(30, [make_request(30, "lost", 5)]), ranks=[1])
    assert answer.code() is grpc.StatusCode.UNAVAILABLE
    assert "reached rank 1, but not rank 0 within 1 s" in answer.details()
    _check_service(shards, 31)


def test_call_on_rank_0_alone_runs_everywhere(shards: Shards) -> None:
    (answer,) = shards.call("Prefill", make_prefill(40, [make_request(40, "alone", 5)]), ranks=[0])
    assert [list(generation.tokens.ids) for generation in answer.generations] == [expected_tokens("alone", 1)]
    (answer,) = shards.call("Decode", pb.DecodeRequest(batches=[answer.batch]), ranks=[0])
    (cleared,) = shards.call("ClearCache", pb.ClearCacheRequest(id=40), ranks=[0])
    assert isinstance(cleared, pb.ClearCacheResponse)
    _check_service(shards, 41)


def test_answer_that_nobody_fetched_is_not_taken_for_the_next_one(shards: Shards) -> None:
    """Decode after Decode is the same message: one that reached rank 0 alone shifts no later answer."""
    prefill = make_prefill(50, [make_request(50, "a", 9), make_request(51, "b", 9)])
    answers = shards.call("Prefill", prefill)
    decode = pb.DecodeRequest(batches=[answers[0].batch])
    shards.call("Decode", decode, ranks=[0])
    answers = shards.call("Decode", decode, [LATE_S, 0])
    answers = shards.call("Decode", decode, [0, LATE_S])
    assert [list(answer.generations[0].tokens.ids) for answer in answers] == [
        expected_tokens("a", 4)[3:],
        expected_tokens("b", 4)[3:],
    ]
    shards.call("ClearCache", pb.ClearCacheRequest(id=50))


@pytest.mark.parametrize("delays_s", [(0, LATE_S), (LATE_S, 0)], ids=["first on rank 0", "first on rank 1"])
def test_refused_calls_have_the_same_answer_on_all(shards: Shards, delays_s) -> None:
    unknown = pb.CachedBatch(id=999)
    prefill = make_prefill(60, [make_request(60, "text", 5)], unknown)
    assert _codes(shards.call("Prefill", prefill, delays_s)) == [grpc.StatusCode.NOT_FOUND] * 2
    decode = pb.DecodeRequest(batches=[unknown])
    assert _codes(shards.call("Decode", decode, delays_s)) == [grpc.StatusCode.NOT_FOUND] * 2
    filter_ = pb.FilterBatchRequest(batch_id=999, request_ids=[1])
    assert _codes(shards.call("FilterBatch", filter_, delays_s)) == [grpc.StatusCode.NOT_FOUND] * 2
    warmup = pb.WarmupRequest(batch=pb.Batch(id=0, requests=[make_request(0, "w", 1)], size=1))
    running = shards.call("Prefill", make_prefill(61, [make_request(61, "running", 9)]))
    assert _codes(shards.call("Warmup", warmup, delays_s)) == [grpc.StatusCode.INVALID_ARGUMENT] * 2
    assert finish(shards, running) == {61: expected_tokens("running", 9)}


@pytest.mark.parametrize("cancel_after_s", [(0.0, 0.0), (0.0, 0.3), (0.3, 0.0), (0.003, 0.006)])
def test_batches_of_a_client_that_goes_away_end_on_all(shards: Shards, cancel_after_s) -> None:
    """At once, on one shard before the other, or in a call that runs already."""
    running = shards.call("Prefill", make_prefill(70, [make_request(70, "runs already", 50)]))
    prefill = make_prefill(71, [make_request(71, "comes with it", 50)], running[0].batch)
    shards.call("Prefill", prefill, cancel_after_s=cancel_after_s)
    for batch_id in (70, 71):
        shards.call("ClearCache", pb.ClearCacheRequest(id=batch_id), [LATE_S, 0])
    _check_service(shards, 72)
    shards.call("ClearCache", pb.ClearCacheRequest(id=72))


def test_probes_in_a_row_beside_a_running_batch_stay_nowhere(shards: Shards) -> None:
    """Of the same ids each time, whichever shard they reach first."""
    probe_id = 2**64 - 1
    probe = make_prefill(probe_id, [make_request(probe_id, "liveness", 1)])
    running = shards.call("Prefill", make_prefill(200, [make_request(200, "goes on", 12)]))
    with ThreadPoolExecutor(4) as threads:
        probes = [threads.submit(shards.call, "Prefill", probe, delays) for delays in ((0, LATE_S), (LATE_S, 0)) * 2]
        assert finish(shards, running) == {200: expected_tokens("goes on", 12)}
        answers = [answer for probe in probes for answer in probe.result()]
    assert not any(answer.HasField("batch") for answer in answers)
    assert [one.request_id for answer in answers for one in answer.generations] == [probe_id] * len(probes)
    _check_service(shards, 210)
