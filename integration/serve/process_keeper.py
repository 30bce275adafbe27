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

from pagedkv.integration.serve.own_processes import (
    kill_group,
    start_plain_process,
    start_process,
    terminate,
    wait_for_ends,
)
from pagedkv.plugin.errors import UnavailableError

MAX_FAILURES = 5
"""So many ends in a row, and there is little hope for a process."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
_MAX_DOUBLINGS = 16
_STEADY_S = 60.0
"""A process that was ready for so long does not fail in a row."""
_POLL_S = 0.2
_LOG_END_S = 2.0
"""How long the last lines of a process that has ended are waited for: what it started may keep its output open."""
_MAX_LINE_BYTES = 2**16

_write_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep."""

    name: str
    """Prefix of its lines in the log."""
    command: Sequence[str]
    environ: Mapping[str, str]
    tells_ready: bool
    """Whether it is a `pagedkv serve`, which writes a summary when it is ready. Others are as soon as they run."""
    cores: Collection[int] = ()
    """Numbers of those it may run on; empty is all."""


@dataclass(slots=True)
class _Kept:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    ready_pipe: int | None
    reader: threading.Thread
    ready_s: float | None
    """Since when it is ready."""
    num_failures: int = 0
    start_again_s: float | None = None
    """When it is started again, after it has ended."""


def write_line(line: str) -> None:
    """Writes a line to standard error, whole. Nobody reading it is no reason to stop."""
    with _write_lock:
        try:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


@dataclass(slots=True)
class ProcessKeeper:
    """Runs processes until `end`. All calls come from one thread, the one that lives as long as the processes shall."""

    write: Callable[[str], None] = write_line
    """Takes each line of the log; called from several threads."""
    first_pause_s: float = _FIRST_PAUSE_S
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def start(self, spec: ProcessSpec) -> None:
        self._kept[spec.name] = self._start(spec)

    def wait_until_ready(self, is_ready: Callable[[], bool], *, is_stopped: Callable[[], bool]) -> bool:
        """Waits until all are ready, and `is_ready`. False if `is_stopped` meanwhile.

        Raises:
            UnavailableError: a process ended instead.
        """
        while True:
            for name, kept in self._kept.items():
                self._hear(kept)
                if kept.process.poll() is not None:
                    raise UnavailableError(
                        f"{name} ended with code {kept.process.returncode} before it was ready; its lines in the log "
                        "say why"
                    )
            if is_stopped():
                return False
            if all(kept.ready_s is not None for kept in self._kept.values()) and is_ready():
                return True
            time.sleep(_POLL_S)

    def look(self) -> None:
        """Starts again what has ended, each after a pause that doubles with every end in a row, up to 30 s."""
        now_s = time.monotonic()
        for name, kept in self._kept.items():
            if kept.start_again_s is not None:
                if now_s >= kept.start_again_s:
                    self._kept[name] = self._start(kept.spec, kept.num_failures)
                continue
            has_ended = kept.process.poll() is not None
            is_new = self._hear(kept)
            if has_ended:
                self._plan_restart(kept, now_s)
            elif is_new:
                self.write(f"{name} | is ready again")

    def find_hopeless(self) -> list[str]:
        """Names of the processes that are not ready and have ended MAX_FAILURES times in a row."""
        return [
            name
            for name, kept in self._kept.items()
            if kept.num_failures >= MAX_FAILURES and (kept.ready_s is None or kept.start_again_s is not None)
        ]

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
        ready_pipe, ready_s = None, None
        if spec.tells_ready:
            started = start_process(spec.command, spec.environ, stdout=out, stderr=error, cores=spec.cores)
            process, ready_pipe = started.process, started.ready_pipe
        else:
            process = start_plain_process(spec.command, spec.environ, stdout=out, stderr=error, cores=spec.cores)
            ready_s = time.monotonic()
        reader = threading.Thread(target=self._copy_lines, args=(spec.name, process), daemon=True)
        reader.start()
        return _Kept(spec, process, ready_pipe, reader, ready_s, num_failures)

    def _copy_lines(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                self.write(f"{name} | {line.decode(errors='replace').rstrip()}")

    @staticmethod
    def _hear(kept: _Kept) -> bool:
        """Whether a process that was not ready tells now that it is."""
        if kept.ready_s is not None or kept.ready_pipe is None:
            return False
        has_news = bool(select.select([kept.ready_pipe], [], [], 0)[0])
        # A summary is written at once. A process that ends without one closes the pipe.
        if has_news and os.read(kept.ready_pipe, 65536):
            kept.ready_s = time.monotonic()
        return kept.ready_s is not None

    def _plan_restart(self, kept: _Kept, now_s: float) -> None:
        code = kept.process.returncode
        self._end_now([kept])
        was_steady = kept.ready_s is not None and now_s - kept.ready_s >= _STEADY_S
        kept.num_failures = 1 if was_steady else kept.num_failures + 1
        pause_s = min(self.first_pause_s * 2 ** min(kept.num_failures - 1, _MAX_DOUBLINGS), _MAX_PAUSE_S)
        kept.start_again_s = now_s + pause_s
        self.write(f"{kept.spec.name} | ended with code {code}; it is started again in {pause_s:g} s")

    @staticmethod
    def _end_now(kept: Collection[_Kept]) -> None:
        for one in kept:
            kill_group(one.process)
            one.reader.join(_LOG_END_S)
            if one.ready_pipe is not None:
                os.close(one.ready_pipe)
                one.ready_pipe = None
