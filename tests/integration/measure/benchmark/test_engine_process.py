"""Processes of engines: what they are asked, that they stand still between, and how they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagedkv.integration.measure.benchmark.engine_process import EngineFailedError, EngineProcess, EngineSpec
from pagedkv.integration.measure.benchmark.runners.protocol import RunRequest

REQUESTS = [RunRequest([1, 2, 3, 4], 3), RunRequest([1, 2], 1)]

MakeSpec = Callable[[str], EngineSpec]


def _wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_engine_answers_repetitions_and_is_stopped_between_them(fake_spec: MakeSpec, tmp_path: Path) -> None:
    with EngineProcess(fake_spec("well"), tmp_path, timeout_s=30) as engine:
        process = psutil.Process(engine.info["pid"])
        for _ in range(2):
            _wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
            repetition = engine.run(REQUESTS)
            assert (repetition.seconds, repetition.prompt_tokens, repetition.new_tokens) == (2.0, 6, 4)
            assert [times.num_tokens for times in repetition.requests] == [3, 1]
            assert repetition.cache["peak_running"] == 2
    assert not process.is_running()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("crash", r"fake ended with code 1; .*\n.*out of memory, says the fake"),
        ("lazy", "fake made 2 tokens where 4 were asked for"),
        ("chatter", "fake said something else than JSON: b'a library says hello'"),
    ],
)
def test_engine_that_fails_is_reported_with_its_last_words(
    fake_spec: MakeSpec, tmp_path: Path, behaviour: str, message: str
) -> None:
    with (
        EngineProcess(fake_spec(behaviour), tmp_path, timeout_s=30) as engine,
        pytest.raises(EngineFailedError, match=message),
    ):
        engine.run(REQUESTS)


def test_engine_that_does_not_start_is_reported_with_its_last_words(fake_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"fake ended with code 3; .*\nthere is no libfoo"):
        EngineProcess(fake_spec("no-start"), tmp_path, timeout_s=30)
    with pytest.raises(EngineFailedError, match="gone can't be started: /nowhere/python: No such file"):
        EngineProcess(EngineSpec("gone", ["/nowhere/python"]), tmp_path, timeout_s=30)


def test_engine_that_takes_too_long_is_ended(fake_spec: MakeSpec, tmp_path: Path) -> None:
    with EngineProcess(fake_spec("hang"), tmp_path, timeout_s=2) as engine:
        process = psutil.Process(engine.info["pid"])
        with pytest.raises(EngineFailedError, match="fake was not done within 2 s"):
            engine.run(REQUESTS)
        process.kill()  # it sleeps, and would be waited for
    assert not process.is_running()


def test_stopped_engine_ends_with_a_benchmark_that_is_killed(fake_peer: str, tmp_path: Path) -> None:
    script = f"""
import os, pathlib, signal
from pagedkv.integration.measure.benchmark.engine_process import EngineProcess, EngineSpec
spec = EngineSpec("fake", [*{fake_peer!r}.split(), "well", "{{}}"])
engine = EngineProcess(spec, pathlib.Path({str(tmp_path)!r}), 30)
print(engine.info["pid"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False)
    _wait_for(lambda: not psutil.pid_exists(int(done.stdout)) or _is_zombie(int(done.stdout)))


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
