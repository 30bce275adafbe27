"""Processes that are kept running: prefixed lines, restarts with growing pauses, a bounded number of them, the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pagedkv.integration.serve.process_keeper import MAX_FAILURES, ProcessKeeper, ProcessSpec
from pagedkv.plugin.errors import UnavailableError

DEADLINE_S = 30.0
READY = "open(int(sys.argv[sys.argv.index('--ready-fd') + 1]), 'w').write('{}\\n'); "


class Log(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def keeper(log: Log) -> Iterator[ProcessKeeper]:
    made = ProcessKeeper(write=log, first_pause_s=0.01)
    yield made
    made.kill()


def script(name: str, code: str, *, tells_ready: bool = False) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", f"import sys, time, os; {code}"], os.environ, tells_ready)


def look_until(keeper: ProcessKeeper, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        keeper.look()
        time.sleep(0.01)


def test_lines_of_both_outputs_get_the_name_as_prefix(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("a", "print('out'); print('err', file=sys.stderr); time.sleep(60)"))
    keeper.start(script("b", "sys.stdout.buffer.write(b'caf\\xff\\n'); sys.stdout.flush(); time.sleep(60)"))
    look_until(keeper, lambda: len(log) == 3)
    assert sorted(log) == ["a | err", "a | out", "b | caf�"]


def test_what_ends_is_started_again_under_its_own_name_and_others_stay(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("stays", "print('mine', flush=True); time.sleep(60)"))
    keeper.start(script("ends", "print(os.getpid(), flush=True); time.sleep(60)"))
    look_until(keeper, lambda: len(log) == 2)
    first = int(next(line for line in log if line.startswith("ends")).split(" | ")[1])
    os.kill(first, signal.SIGKILL)
    look_until(keeper, lambda: len(log) == 4)
    assert log[2] == "ends | ended with code -9; it is started again in 0.01 s"
    assert log[3].startswith("ends | ")
    assert log[3] != f"ends | {first}"
    assert log.count("stays | mine") == 1


def test_what_ends_again_and_again_is_given_up_and_pauses_double(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("bad", "sys.exit(7)"))
    with pytest.raises(UnavailableError, match=f"bad has ended {MAX_FAILURES} times in a row, at last with code 7"):
        look_until(keeper, lambda: False)
    pauses = [float(line.split(" in ")[1].removesuffix(" s")) for line in log]
    assert pauses == [0.01, 0.02, 0.04, 0.08]


def test_readiness_is_waited_for_and_an_end_before_it_is_an_error(keeper: ProcessKeeper) -> None:
    keeper.start(script("good", READY + "time.sleep(60)", tells_ready=True))
    assert keeper.wait_until_ready("good", is_stopped=lambda: False) == b"{}\n"
    keeper.start(script("bad", "sys.exit(3)", tells_ready=True))
    with pytest.raises(UnavailableError, match="bad ended with code 3 before it was ready"):
        keeper.wait_until_ready("bad", is_stopped=lambda: False)
    keeper.start(script("slow", "time.sleep(60)", tells_ready=True))
    assert keeper.wait_until_ready("slow", is_stopped=lambda: True) is None


def test_the_end_asks_first_and_kills_what_does_not_end(keeper: ProcessKeeper, log: Log) -> None:
    ready = "print('ready', flush=True); time.sleep(60)"
    keeper.start(script("polite", f"import signal; signal.signal(15, lambda *_: sys.exit(0)); {ready}"))
    keeper.start(script("deaf", f"import signal; signal.signal(15, signal.SIG_IGN); {ready}"))
    look_until(keeper, lambda: len(log) == 2)
    pids = {child.pid for child in psutil.Process().children()}
    assert keeper.end(["polite"], DEADLINE_S) == []
    assert keeper.end(["deaf", "never started"], 0.2) == ["deaf"]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_a_hurried_end_does_not_wait(keeper: ProcessKeeper, log: Log) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    keeper.start(script("deaf", code))
    look_until(keeper, lambda: len(log) == 1)
    started_s = time.monotonic()
    assert keeper.end(["deaf"], DEADLINE_S, is_hurried=lambda: True) == ["deaf"]
    assert time.monotonic() - started_s < DEADLINE_S
