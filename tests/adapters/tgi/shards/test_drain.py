"""Shards end together, whichever of them is asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb

from .shard_client import Host, expected_tokens, finish, make_prefill, make_request, wait_until

LATE_S = 0.1


def _codes(answers: list[Any]) -> list[grpc.StatusCode]:
    return [answer.code() for answer in answers]


@pytest.mark.parametrize("terminated_rank", [0, 1])
def test_drain_is_one_decision_whichever_shard_is_asked(host: Host, terminated_rank: int) -> None:
    with host.running(terminated_rank=None) as shards:
        running = shards.call("Prefill", make_prefill(1, [make_request(1, "still runs", 20)]))
        os.kill(shards.pids[terminated_rank], signal.SIGTERM)
        wait_until(
            lambda: all(isinstance(answer, grpc.RpcError) for answer in shards.call("Health", pb.HealthRequest()))
        )
        refused = shards.call("Prefill", make_prefill(2, [make_request(2, "new", 5)]), [0, LATE_S])
        assert _codes(refused) == [grpc.StatusCode.UNAVAILABLE] * 2
        assert finish(shards, running) == {1: expected_tokens("still runs", 20)}
    host.check_good_end()


def test_drain_that_runs_out_of_time_ends_all_shards_alike(host: Host) -> None:
    with host.running(terminated_rank=1, drain_timeout_s=0.3) as shards:
        shards.call("Prefill", make_prefill(1, [make_request(1, "never ends", 100)]))
    assert host.ends == [(1, ""), (1, "")]


def test_abandoned_batch_ends_by_the_clock_of_rank_0(host: Host) -> None:
    with host.running(server={"abandoned_batch_timeout_s": 0.3}) as shards:
        shards.call("Prefill", make_prefill(1, [make_request(1, "left behind", 100)]))
        decode = pb.DecodeRequest(batches=[pb.CachedBatch(id=1)])
        time.sleep(0.3)
        wait_until(lambda: time.sleep(0.4) or isinstance(shards.call("Decode", decode)[0], grpc.RpcError))
        assert _codes(shards.call("Decode", decode)) == [grpc.StatusCode.NOT_FOUND] * 2
    host.check_good_end()


def test_sigterm_to_a_shard_while_calls_arrive_ends_nothing(host: Host) -> None:
    """What runs goes on to its end, and what comes too late is refused on both."""
    with host.running(terminated_rank=None, max_delay_s=0.02) as shards:
        threading.Timer(0.05, os.kill, (shards.pids[1], signal.SIGTERM)).start()
        outcomes: list[bool] = []
        for index in range(1000):
            answers = shards.call("Prefill", make_prefill(index, [make_request(index, "text", 3)]), [0, 0.004])
            refused = [isinstance(answer, grpc.RpcError) for answer in answers]
            assert len(set(refused)) == 1
            outcomes.append(refused[0])
            if refused[0]:
                break
            assert finish(shards, answers) == {index: expected_tokens("text", 3)}
        assert outcomes[-1]
    host.check_good_end()
