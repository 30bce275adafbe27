"""Health probes of a router: a Prefill beside everything else, of ever the same ids, whose batch nobody names again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

PROBE_ID = 2**64 - 1
NUM_RUNNING = 256


def make_probe(wire: Any) -> pb.PrefillRequest:
    request = wire.request(PROBE_ID, "liveness", 1, truncate=1, blocks=[0], slots=[0], add_special_tokens=False)
    return pb.PrefillRequest(batch=pb.Batch(id=PROBE_ID, requests=[request], size=1, max_tokens=2, max_blocks=1))


def send_probe(wire: Any) -> pb.PrefillResponse:
    return wire.stub.Prefill(make_probe(wire), timeout=30)


def test_a_probe_that_got_no_token_in_its_call_is_gone_with_its_answer(wire, backend):
    running = wire.prefill(1, wire.request(1, "a"))
    backend.prefill_budget = 0
    for _ in range(3):
        answer = send_probe(wire)
        assert not answer.generations
        assert not answer.HasField("batch")
        assert set(backend.requests) == {1}
    backend.prefill_budget = 100
    assert send_probe(wire).generations[0].generated_text.text == "t"
    assert wire.finish(running) == {1: "bcdef"}


def test_probes_at_the_same_time_are_all_answered(wire, backend):
    entered, go_on = threading.Event(), threading.Event()
    running = wire.prefill(1, wire.request(1, "a"))
    backend.before_step = lambda ids: (entered.set(), go_on.wait(10))
    calls = [wire.stub.Prefill.future(make_probe(wire)) for _ in range(4)]
    assert entered.wait(5)
    go_on.set()
    assert [call.result(10).generations[0].request_id for call in calls] == [PROBE_ID] * 4
    assert wire.finish(running) == {1: "bcdef"}


def test_a_probe_whose_client_goes_away_leaves_nothing(wire, backend):
    entered, go_on = threading.Event(), threading.Event()
    backend.before_step = lambda ids: (entered.set(), go_on.wait(10))
    call = wire.stub.Prefill.future(make_probe(wire))
    assert entered.wait(5)
    call.cancel()
    go_on.set()
    backend.before_step = lambda ids: None
    assert send_probe(wire).generations[0].request_id == PROBE_ID


def test_a_probe_between_a_failed_prefill_and_its_clear_leaves_no_running_batch(wire, backend):
    running = wire.prefill(1, wire.request(1, "a")).batch
    other = wire.prefill(5, wire.request(5, "a"))
    with pytest.raises(grpc.RpcError):
        wire.prefill(2, running=running)
    send_probe(wire)
    wire.decode(other.batch)
    wire.clear(2)
    assert set(backend.requests) == {5}
    wire.clear(5)


def test_several_failed_prefills_before_their_clears_leave_nothing(wire, backend):
    running = [wire.prefill(i, wire.request(i, "a")).batch for i in (1, 2, 3)]
    for batch in running:
        with pytest.raises(grpc.RpcError):
            wire.prefill(10 + batch.id, running=batch)
    for i in (11, 12):
        wire.clear(i)
    assert set(backend.requests) == {3}
    wire.clear(13)
    assert not backend.requests


@pytest.fixture
def serve_paged(serving: Callable[..., Any], make_tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """A server with a paged cache of so many blocks of 16 tokens."""

    def serve(num_blocks: int) -> Any:
        model = TokenModel(vocab_size=258)
        keys = {"model.path": "none", "cache.num_blocks": num_blocks, "limits.max_total_tokens": 64}
        config = resolve_config(load_config(None, keys, {}), model.spec)
        backend = PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))
        return serving(backend, make_tokenizer(), tmp_path)

    return serve


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def assert_idle(served: SimpleNamespace) -> None:
    stats = served.backend.stats()
    assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
    served.backend.check_integrity()
    assert served.server.service.num_requests == 0


def test_probes_beside_as_many_streams_as_may_run(serve_paged):
    with serve_paged(4 * NUM_RUNNING) as served:
        wire = served.wire
        requests = [
            wire.request(i, chr(97 + i % 26), 6, stopping_parameters={"ignore_eos_token": True})
            for i in range(NUM_RUNNING)
        ]
        response = wire.prefill(1, *requests)
        assert len(response.generations) == NUM_RUNNING
        for _ in range(2):
            assert not send_probe(wire).HasField("batch")
            response = wire.decode(response.batch)
            assert len(response.generations) == NUM_RUNNING, "no stream waits for a probe"
        wire.finish(response)
        assert [g.request_id for g in send_probe(wire).generations] == [PROBE_ID]
        assert_idle(served)


def test_probes_with_a_full_pool_are_answered_and_take_nothing_from_streams(serve_paged):
    """Of a single block's room each stream has all that is left: a probe finds none, and preempts nobody."""
    with serve_paged(4) as served:
        wire = served.wire
        forever = {"ignore_eos_token": True}
        requests = [wire.request(i, chr(97 + i) * 20, 12, stopping_parameters=forever) for i in range(2)]
        response = wire.prefill(1, *requests)
        assert served.backend.stats().num_used_blocks == 4
        for _ in range(2):
            answer = send_probe(wire)
            assert not answer.HasField("batch")
            assert served.backend.stats().preemptions == 0
            response = wire.decode(response.batch)
            assert len(response.generations) == 2, "no stream waits for a probe"
        wire.finish(response)
        assert [g.request_id for g in send_probe(wire).generations] == [PROBE_ID]
        assert_idle(served)
