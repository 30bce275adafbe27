"""Starts the shards of a model as processes on this machine, and stops all of them when one ends."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pagedkv.integration.serve.process import ServerSummary

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 15.0
"""How long the other shards may take to end after one has ended. After that they are killed."""


class ShardProcesses:
    """The running shards. Each has its own session: Ctrl-C in a terminal reaches it once, through this process."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_stop_asked = False

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the shard of the next rank, with its standard output as a pipe to this process."""
        process = subprocess.Popen(  # noqa: S603 - our own command with the caller's arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._processes.append(process)

    def terminate(self) -> None:
        """Asks every shard to drain; at a second call, to end at once."""
        self._is_stop_asked = True
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def read_summaries(self) -> list[dict[str, Any]] | None:
        """Waits until all shards are ready and returns their summaries; None if one ended before."""
        received = dict.fromkeys(range(len(self._processes)), b"")
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while not all(line.endswith(b"\n") for line in received.values()):
                for key, _ in selector.select(_POLL_S):
                    piece = os.read(key.fd, 65536)
                    received[key.data] += piece
                    if not piece:
                        return None
        return [json.loads(line) for line in received.values()]

    def wait_for_first_end(self) -> int:
        """Returns the exit code of the first shard that ends, negative for a signal."""
        while True:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    logger.info("rank %d has ended; the others end with it", rank)
                    return process.returncode
            time.sleep(_POLL_S)

    def stop(self) -> list[int]:
        """Stops running shards; kills those that do not end in time. Returns all exit codes, by rank."""
        if not self._is_stop_asked:
            self.terminate()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        return [self._end(rank, process, deadline_s) for rank, process in enumerate(self._processes)]

    def _end(self, rank: int, process: subprocess.Popen[bytes], deadline_s: float) -> int:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not end; killing it", rank)
            process.kill()
        assert process.stdout is not None
        process.stdout.close()
        code = process.wait()
        logger.info("rank %d ended with code %d", rank, code)
        return code


def supervise(command: Sequence[str], num_shards: int, announce: Callable[[ServerSummary], None]) -> int:
    """Runs shards until one of them ends, or a signal ends all. SIGTERM and SIGINT are sent to every shard as SIGTERM.

    Args:
        command: of a shard, to which its rank and --json are added.
        announce: called once, when all shards are ready.

    Returns:
        0 if all shards exited with 0, else the exit code of the first that did not.
    """
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_find_free_port()), **os.environ}
    shards = ShardProcesses()
    with _forwarded_signals(shards):
        try:
            for rank in range(num_shards):
                shards.start([*command, "--rank", str(rank), "--json"], environ)
            summaries = shards.read_summaries()
            if summaries is not None:
                announce(_join_summaries(summaries))
            codes = [shards.wait_for_first_end()]
        finally:
            others = shards.stop()
    failed = next((code for code in [*codes, *others] if code), 0)
    return failed if failed >= 0 else 128 - failed


def _end_with_parent() -> None:
    """Makes the kernel end this process with its parent, so that a killed supervisor leaves no shards behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _forwarded_signals(shards: ShardProcesses) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        shards.terminate()

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _join_summaries(summaries: Sequence[dict[str, Any]]) -> ServerSummary:
    """Combines the summaries of all shards: all addresses, and the sum of their bytes."""
    fields = {name: value for name, value in summaries[0].items() if name != "event"}
    fields["targets"] = tuple(target for summary in summaries for target in summary["targets"])
    fields["metrics_urls"] = tuple(url for summary in summaries for url in summary["metrics_urls"])
    fields["kv_bytes_total"] = sum(summary["kv_bytes_total"] for summary in summaries)
    return ServerSummary(**fields)
