"""Processes that are kept running: prefixed lines, restarts with growing pauses, a bounded number of them, the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pagedkv.integration.serve import process_keeper
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


def pause_of(line: str) -> float:
    return float(line.split(" in ")[1].removesuffix(" s"))


def look_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def look_until(keeper: ProcessKeeper, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        keeper.look()
        time.sleep(0.01)


def test_lines_of_both_outputs_get_the_name_as_prefix(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("a", "print('out', flush=True); print('err', file=sys.stderr); time.sleep(60)"))
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


def test_what_ends_again_and_again_is_hopeless_after_pauses_that_double(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("good", "time.sleep(60)"))
    keeper.start(script("bad", "sys.exit(7)"))
    look_until(keeper, lambda: bool(keeper.find_hopeless()))
    assert keeper.find_hopeless() == ["bad"]
    assert log[0] == "bad | ended with code 7; it is started again in 0.01 s"
    assert [pause_of(line) for line in log] == [0.01, 0.02, 0.04, 0.08, 0.16]
    assert len(log) == MAX_FAILURES


def test_pauses_stay_bounded_however_often_a_process_ends(log: Log) -> None:
    keeper = ProcessKeeper(write=log, first_pause_s=1e-6)
    keeper.start(script("bad", "sys.exit(7)"))
    kept = keeper._kept["bad"]
    look_until(keeper, lambda: bool(log))
    kept.num_failures, kept.start_again_s = 5000, 0.0
    look_until(keeper, lambda: len(log) == 2)
    assert pause_of(log[1]) < 30
    keeper.kill()


def test_a_process_that_loads_for_long_and_then_ends_is_not_steady(
    keeper: ProcessKeeper, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_keeper, "_STEADY_S", -1.0)
    keeper.start(script("loads", "sys.exit(1)", tells_ready=True))
    keeper.start(script("serves", READY + "sys.exit(1)", tells_ready=True))
    keeper.start(script("runs", "sys.exit(1)"))
    look_until(keeper, lambda: keeper.find_hopeless() == ["loads"])
    assert {pause_of(line) for line in log if line.startswith(("serves | ended", "runs"))} == {0.01}


def test_readiness_is_waited_for_and_an_end_before_it_is_an_error(keeper: ProcessKeeper) -> None:
    keeper.start(script("good", READY + "time.sleep(60)", tells_ready=True))
    keeper.start(script("also good", "time.sleep(60)"))
    answers = iter((False, False, True))
    assert keeper.wait_until_ready(lambda: next(answers), is_stopped=lambda: False)
    assert next(answers, None) is None
    keeper.start(script("slow", "time.sleep(60)", tells_ready=True))
    assert not keeper.wait_until_ready(lambda: True, is_stopped=lambda: True)
    keeper.start(script("bad", "sys.exit(3)", tells_ready=True))
    with pytest.raises(UnavailableError, match="bad ended with code 3 before it was ready"):
        keeper.wait_until_ready(lambda: True, is_stopped=lambda: False)


def test_a_process_tells_that_it_is_ready_again(keeper: ProcessKeeper, log: Log) -> None:
    keeper.start(script("worker", READY + "print(os.getpid(), flush=True); time.sleep(60)", tells_ready=True))
    look_until(keeper, lambda: len(log) == 2)
    os.kill(int(next(line for line in log if line[-1].isdigit()).split(" | ")[1]), signal.SIGKILL)
    look_until(keeper, lambda: log.count("worker | is ready again") == 2)
    assert keeper.find_hopeless() == []


def test_what_a_process_started_ends_with_it_and_what_left_it_is_not_waited_for(
    keeper: ProcessKeeper, log: Log
) -> None:
    """The second has a session of its own and keeps the output open."""
    code = "import subprocess; print({pid}, flush=True); time.sleep(60)"
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session={own}).pid"
    keeper.start(script("with child", code.format(pid=child.format(own=False))))
    keeper.start(script("with runaway", code.format(pid=child.format(own=True))))
    look_until(keeper, lambda: len(log) == 2)
    pids = {line.split(" | ")[0]: int(line.split(" | ")[1]) for line in log}
    keeper.kill()
    try:
        look_until_gone(pids["with child"])
        assert psutil.pid_exists(pids["with runaway"])
    finally:
        os.kill(pids["with runaway"], signal.SIGKILL)


def test_lines_are_written_whole_and_to_a_closed_output_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Output:
        def write(self, text: str) -> None:
            written.append(text)

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Output())
    process_keeper.write_line("one")
    assert written == ["one\n"]


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
