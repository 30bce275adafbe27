"""Joining, in one process: who is missing, who is not let in, what a failure_detector tells."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from pagedkv.plugin.distributed import ShardInfo, join_shards, joined_group
from pagedkv.plugin.errors import ConfigError, ShardError
from pagedkv.plugin.failure_detector import FailureDetector, connect_failure_detector

HOST = "127.0.0.1"
FAST_S = 5.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=FAST_S))


@pytest.fixture
def ends() -> Iterator[Callable[[], tuple[FailureDetector, FailureDetector, list[str], list[str]]]]:
    """Makes the lifelines of ranks 0 and 1, and lists of what each was told."""
    made: list[FailureDetector] = []

    def make() -> tuple[FailureDetector, FailureDetector, list[str], list[str]]:
        first, second = socket.socketpair()
        told: tuple[list[str], list[str]] = [], []
        made.append(FailureDetector(0, {1: first}, told[0].append))
        made.append(FailureDetector(1, {0: second}, told[1].append))
        return made[0], made[1], *told

    yield make
    for failure_detector in reversed(made):
        failure_detector.leave()


def _eventually(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + FAST_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _is_hung_up_on(connection: socket.socket) -> bool:
    connection.settimeout(FAST_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_missing_ranks_are_named(store: TCPStore) -> None:
    with pytest.raises(ShardError, match=r"ranks 1, 2 did not join within 0.1 s"):
        connect_failure_detector(0, 3, store, HOST, 0.1, lambda message: None)


def test_caller_without_the_secret_or_with_a_wrong_rank_is_not_let_in(store: TCPStore) -> None:
    made: list[FailureDetector] = []
    told: list[str] = []
    accepting = threading.Thread(
        target=lambda: made.append(connect_failure_detector(0, 2, store, HOST, FAST_S, told.append)), daemon=True
    )
    accepting.start()
    own_store = TCPStore(HOST, store.port, is_master=False, timeout=timedelta(seconds=FAST_S))
    port, secret = own_store.get("pagedkv/failure_detector").decode().split(" ")
    for greeting in (b"guess 1\n", f"{secret} 7\n".encode(), f"{secret} one\n".encode(), b"x" * 200):
        with socket.create_connection((HOST, int(port))) as stranger:
            stranger.sendall(greeting)
            assert _is_hung_up_on(stranger)
    joined = connect_failure_detector(1, 2, own_store, HOST, FAST_S, told.append)
    accepting.join(FAST_S)
    joined.leave()
    made[0].leave()
    assert told == []


def test_rank_that_finds_no_first_one_says_where_it_looked() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ShardError, match=rf"rank 1 can't reach rank 0 at {HOST}:{port} within 1 s"):
        join_shards(ShardInfo(1, 2), HOST, port, device_type="cpu", on_failure=print, join_timeout_s=1)
    assert joined_group() is None


def test_port_in_use_is_refused() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="set MASTER_PORT to a free port"):
            join_shards(ShardInfo(0, 2), HOST, port, device_type="cpu", on_failure=print, join_timeout_s=1)
    assert joined_group() is None


def test_failure_reaches_both_ends_once(ends) -> None:
    first, second, told_first, told_second = ends()
    second.fail("rank 1 is broken\nin two lines")
    second.fail("and again")
    _eventually(lambda: told_first)
    assert told_first == ["rank 1 is broken in two lines"]
    assert told_second == ["rank 1 is broken\nin two lines"]
    assert first.failure == told_first[0]
    assert first.wait_for_report()


def test_second_failure_waits_until_the_handler_of_the_first_is_through() -> None:
    first, second = socket.socketpair()
    is_handling, can_end = threading.Event(), threading.Event()
    handled: list[str] = []

    def handle(message: str) -> None:
        is_handling.set()
        can_end.wait(FAST_S)
        handled.append(message)

    failure_detector = FailureDetector(0, {1: first}, handle)
    peer = FailureDetector(1, {0: second}, lambda message: None)
    peer.fail("rank 1 has decided differently")
    assert is_handling.wait(FAST_S)
    threading.Timer(0.1, can_end.set).start()
    failure_detector.fail("rank 0 has decided differently")
    assert handled == ["rank 1 has decided differently"]
    peer.leave()
    failure_detector.leave()


def test_leaving_in_order_is_no_failure(ends) -> None:
    first, second, told_first, told_second = ends()
    assert first.departed_ranks() == []
    second.leave()
    _eventually(first.departed_ranks)
    assert first.departed_ranks() == [1]
    assert told_first == told_second == []


def test_leaving_with_a_failure_ends_the_other_alone(ends) -> None:
    _, second, told_first, told_second = ends()
    second.leave("rank 1 has failed: no memory")
    _eventually(lambda: told_first)
    assert told_first == ["rank 1 has failed: no memory"]
    assert told_second == []


def test_task_within_its_time_limit_is_no_failure_and_one_beyond_it_is(ends) -> None:
    first, _, told_first, told_second = ends()
    with first.time_limit(FAST_S, "step 1"):
        time.sleep(0.2)
    time.sleep(0.2)
    assert told_first == []
    with first.time_limit(0.05, "step 2"):
        _eventually(lambda: told_first and told_second)
    assert told_first == told_second
    assert told_first[0].startswith("step 2 has taken more than 0.05 s on rank 0: another shard hangs")
