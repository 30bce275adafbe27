"""Starts processes of our own, in sessions of their own, and ends them: for whatever supervises several."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here: between fork and exec, where another thread may hold the loader's lock, it could wait for ever."""


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """A process, and the end of a pipe from which the line comes that says it is ready."""

    process: subprocess.Popen[bytes]
    ready_pipe: int


def start_process(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdout: int | None,
    stderr: int | None = None,
    cores: Collection[int] = (),
) -> OwnProcess:
    """Starts a `pagedkv serve`, to which the pipe for its summary is added.

    It has a session of its own, so that Ctrl-C in a terminal reaches it once, through this process, and it ends with
    this process.

    Args:
        stdout, stderr: as of `subprocess.Popen`.
        cores: numbers of those it may run on; empty is all.
    """
    reader, writer = os.pipe()
    with_pipe = [*command, "--ready-fd", str(writer)]
    try:
        process = start_plain_process(with_pipe, environ, stdout=stdout, stderr=stderr, cores=cores, pass_fds=(writer,))
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return OwnProcess(process, reader)


def start_plain_process(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdout: int | None,
    stderr: int | None = None,
    cores: Collection[int] = (),
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """The same of a program that does not say when it is ready."""
    parent = os.getpid()

    def prepare() -> None:
        _end_with(parent)
        if cores:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(  # noqa: S603 - the callers' own commands
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        env=dict(environ),
        start_new_session=True,
        preexec_fn=prepare if sys.platform == "linux" else None,
    )


def wait_for_ends(
    processes: Collection[subprocess.Popen[bytes]], timeout_s: float, is_hurried: Callable[[], bool] = lambda: False
) -> bool:
    """Waits until all have ended. Returns whether they have, in time and before `is_hurried`."""
    deadline_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= deadline_s or is_hurried():
            return False
        time.sleep(_POLL_S)
    return True


def terminate(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Sends SIGTERM to those that still run."""
    for process in processes:
        if process.poll() is None:
            process.terminate()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that still runs, and what it has started in its session. Waits for its end."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_free_ports(num_ports: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports on which nothing listens."""
    listeners = [socket.create_server((host, 0)) for _ in range(num_ports)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextlib.contextmanager
def forwarded_signals(forward: Callable[[], None]) -> Iterator[None]:
    """Context manager in which SIGTERM and SIGINT call `forward` and do nothing else."""

    def handle(number: int, frame: FrameType | None) -> None:
        forward()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_with(parent: int) -> None:
    """Makes the kernel end this process with its parent, so that a killed supervisor leaves nothing behind."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # It ended before.
        os.kill(os.getpid(), signal.SIGTERM)
