"""Keeps processes running: one log with a prefix for each, starts again what ends, ends all."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pagedkv.integration.serve.own_processes import start_plain_process, start_process, terminate, wait_for_ends
from pagedkv.plugin.errors import UnavailableError

MAX_FAILURES = 5
"""So many ends in a row, and a process is not started again."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
_STEADY_S = 60.0
"""A process that ran for so long has not failed at its start."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep."""

    name: str
    """Prefix of its lines in the log."""
    command: Sequence[str]
    environ: Mapping[str, str]
    tells_ready: bool
    """Whether it is a `pagedkv serve`, which writes a summary when it is ready."""
    cores: Collection[int] = ()
    """Numbers of those it may run on; empty is all."""


@dataclass(slots=True)
class _Kept:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    ready_pipe: int | None
    started_s: float
    reader: threading.Thread
    num_failures: int = 0
    start_again_s: float | None = None
    """When it is started again, after it has ended."""


@dataclass(slots=True)
class ProcessKeeper:
    """Runs processes until `end`. All calls come from one thread, the one that lives as long as the processes shall."""

    write: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    """Takes each line of the log; called from several threads."""
    first_pause_s: float = _FIRST_PAUSE_S
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def start(self, spec: ProcessSpec) -> None:
        self._kept[spec.name] = self._start(spec)

    def wait_until_ready(self, name: str, *, is_stopped: Callable[[], bool]) -> bytes | None:
        """Waits for the summary of a process that has just been started; None if `is_stopped` meanwhile.

        Raises:
            UnavailableError: the process ended instead.
        """
        kept = self._kept[name]
        assert kept.ready_pipe is not None
        line = b""
        while not line.endswith(b"\n"):
            if is_stopped():
                return None
            if not select.select([kept.ready_pipe], [], [], _POLL_S)[0]:
                continue
            piece = os.read(kept.ready_pipe, 65536)
            if not piece:
                raise UnavailableError(f"{name} ended with code {kept.process.wait()} before it was ready")
            line += piece
        return line

    def has_ended(self, name: str) -> bool:
        return self._kept[name].process.poll() is not None

    def look(self) -> None:
        """Starts again what has ended, each after a pause that doubles with every end in a row.

        Raises:
            UnavailableError: a process has ended MAX_FAILURES times in a row.
        """
        now_s = time.monotonic()
        for name, kept in self._kept.items():
            if kept.start_again_s is None and kept.process.poll() is not None:
                self._plan_restart(kept, now_s)
            elif kept.start_again_s is not None and now_s >= kept.start_again_s:
                self._kept[name] = self._start(kept.spec, kept.num_failures)

    def end(
        self, names: Collection[str], timeout_s: float, *, is_hurried: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Asks processes to end, and kills those that do not in time, or when `is_hurried`. Returns these's names."""
        kept = [self._kept[name] for name in names if name in self._kept]
        processes = [one.process for one in kept]
        terminate(processes)
        wait_for_ends(processes, timeout_s, is_hurried)
        killed = [one.spec.name for one in kept if one.process.poll() is None]
        self._end_now(kept)
        return killed

    def kill(self) -> None:
        """Ends all at once."""
        self._end_now(list(self._kept.values()))

    def _start(self, spec: ProcessSpec, num_failures: int = 0) -> _Kept:
        out, error = subprocess.PIPE, subprocess.STDOUT
        ready_pipe = None
        if spec.tells_ready:
            started = start_process(spec.command, spec.environ, stdout=out, stderr=error, cores=spec.cores)
            process, ready_pipe = started.process, started.ready_pipe
        else:
            process = start_plain_process(spec.command, spec.environ, stdout=out, stderr=error, cores=spec.cores)
        reader = threading.Thread(target=self._copy_lines, args=(spec.name, process), daemon=True)
        reader.start()
        return _Kept(spec, process, ready_pipe, time.monotonic(), reader, num_failures)

    def _copy_lines(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.write(f"{name} | {line.decode(errors='replace').rstrip()}")

    def _plan_restart(self, kept: _Kept, now_s: float) -> None:
        code = kept.process.returncode
        self._end_now([kept])
        kept.num_failures = 1 if now_s - kept.started_s >= _STEADY_S else kept.num_failures + 1
        if kept.num_failures >= MAX_FAILURES:
            raise UnavailableError(
                f"{kept.spec.name} has ended {MAX_FAILURES} times in a row, at last with code {code}; its lines in the "
                "log say why"
            )
        pause_s = min(self.first_pause_s * 2 ** (kept.num_failures - 1), _MAX_PAUSE_S)
        kept.start_again_s = now_s + pause_s
        self.write(f"{kept.spec.name} | ended with code {code}; it is started again in {pause_s:g} s")

    def _end_now(self, kept: Collection[_Kept]) -> None:
        for one in kept:
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()
            one.reader.join()
            if one.process.stdout is not None:
                one.process.stdout.close()
            if one.ready_pipe is not None:
                os.close(one.ready_pipe)
                one.ready_pipe = None
