"""Runs `pagedkv serve` as a child process: for the quickstart, benchmarks and tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.plugin.errors import UnavailableError

_POLL_S = 0.2
_STOP_TIMEOUT_S = 30.0
_LOG_TAIL_CHARS = 2000


def command_path() -> str:
    """Path of the console script `pagedkv` of this environment."""
    return str(Path(sysconfig.get_path("scripts"), "pagedkv"))


@dataclass(frozen=True, slots=True)
class ChildServer:
    """A server process that is ready for requests."""

    process: subprocess.Popen[bytes]
    target: str
    """Address that a gRPC client can connect to."""
    summary: Mapping[str, Any]
    """The fields of `ServerSummary`."""
    log: Path
    """File with the server's standard error."""

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Asks the server to drain and waits for its end; kills it after the timeout. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def child_server(
    arguments: Sequence[str], log: Path, *, environ: Mapping[str, str] | None = None, ready_timeout_s: float = 300.0
) -> Iterator[ChildServer]:
    """Context manager that runs a server.

    Args:
        arguments: of `pagedkv serve`.
        log: file for its standard output and error; its summary comes through a pipe of its own.
        environ: variables in addition to those of this process.
        ready_timeout_s: how long loading and warm-up may take.

    Raises:
        UnavailableError: the server ended, or was not ready in time; the message ends with its last log lines.
    """
    reader, writer = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command with the caller's arguments
            [command_path(), "serve", *arguments, "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            # Several servers on one machine must not use the same port for metrics.
            env={"PAGEDKV_METRICS_LISTEN": "127.0.0.1:0", **os.environ, **(environ or {})},
        )
    try:
        os.close(writer)
        summary = _wait_until_ready(process, reader, log, time.monotonic() + ready_timeout_s)
        server = ChildServer(process, summary["targets"][0], summary, log)
        yield server
        server.stop()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(reader)


def _wait_until_ready(process: subprocess.Popen[bytes], reader: int, log: Path, deadline_s: float) -> Mapping[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"the server was not ready in time; its log ends with:\n{_tail(log)}")
        if not select.select([reader], [], [], _POLL_S)[0]:
            continue
        piece = os.read(reader, 4096)
        if not piece:
            raise UnavailableError(f"the server ended with code {process.wait()}:\n{_tail(log)}")
        line += piece
    summary: Mapping[str, Any] = json.loads(line)
    return summary


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:].strip()
