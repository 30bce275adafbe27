"""Starts the shards of a model as processes on this machine, and stops all of them when one ends."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedkv.integration.serve.own_processes import (
    find_free_ports,
    forwarded_signals,
    start_process,
    terminate,
    wait_for_ends,
)
from pagedkv.integration.serve.process import ServerSummary
from pagedkv.integration.serve.shards import EXIT_SHARD_FAILED

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_STANDARD_ERROR = 2
_DRAINED_END_S = 30.0
"""How long the others may take to end by themselves after one that has drained, before they are asked to."""
_FAILED_END_S = 5.0
"""The same after one that has failed."""
_STOP_TIMEOUT_S = 15.0
"""How long the other shards may take to end after one has ended. After that they are killed."""


class ShardProcesses:
    """The running shards. Each has its own session: Ctrl-C in a terminal reaches it once, through this process."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._summary_pipes: list[int] = []
        self._is_stop_asked = False

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the shard of the next rank.

        Its summary comes through a pipe of its own: libraries may print anything to standard output, which goes to
        standard error here.
        """
        started = start_process(command, environ, stdout=_STANDARD_ERROR)
        self._summary_pipes.append(started.ready_pipe)
        self._processes.append(started.process)

    def terminate(self) -> None:
        """Asks every shard to drain; at a second call, to end at once."""
        self._is_stop_asked = True
        terminate(self._processes)

    def read_summaries(self) -> list[dict[str, Any]] | None:
        """Waits until all shards are ready and returns their summaries; None if one ended before."""
        received = dict.fromkeys(self._summary_pipes, b"")
        with selectors.DefaultSelector() as selector:
            for pipe in received:
                selector.register(pipe, selectors.EVENT_READ)
            while not all(line.endswith(b"\n") for line in received.values()):
                for key, _ in selector.select(_POLL_S):
                    piece = os.read(key.fd, 65536)
                    if not piece and not received[key.fd].endswith(b"\n"):
                        return None
                    received[key.fd] += piece
                    if not piece:
                        selector.unregister(key.fd)
        return [json.loads(line) for line in received.values()]

    def wait_for_first_end(self) -> int:
        """Waits until a shard ends. Returns its exit code, negative for a signal."""
        while True:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    logger.info("rank %d has ended; the others end with it", rank)
                    return process.returncode
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = 0.0) -> list[int]:
        """Ends the shards that still run; kills those that do not end in time. Returns all exit codes, by rank.

        Args:
            grace_s: how long they may take to end by themselves, as shards do, before they are asked to. One that is
                asked a second time ends at once.
        """
        wait_for_ends(self._processes, grace_s)
        if not self._is_stop_asked:
            self.terminate()
        wait_for_ends(self._processes, _STOP_TIMEOUT_S)
        codes = [self._end(rank, process) for rank, process in enumerate(self._processes)]
        for pipe in self._summary_pipes:
            os.close(pipe)
        self._summary_pipes = []
        return codes

    def find_exit_code(self, codes: Sequence[int]) -> int:
        """The one exit code for shards that ended with these; see `supervise`."""
        own = next((code for code in codes if code > 0 and code != EXIT_SHARD_FAILED), None)
        if own is not None:
            return own
        asked = {0, -signal.SIGTERM} if self._is_stop_asked else {0}
        if set(codes) - asked:
            return EXIT_SHARD_FAILED
        return 128 + signal.SIGTERM if -signal.SIGTERM in codes else 0

    @staticmethod
    def _end(rank: int, process: subprocess.Popen[bytes]) -> int:
        if process.poll() is None:
            logger.warning("rank %d does not end; killing it", rank)
            process.kill()
        code = process.wait()
        logger.info("rank %d ended with code %d", rank, code)
        return code


def supervise(command: Sequence[str], num_shards: int, announce: Callable[[ServerSummary], None]) -> int:
    """Runs shards until one of them ends, or a signal ends all. SIGTERM and SIGINT are sent to every shard as SIGTERM.

    Args:
        command: of a shard, to which its rank and the pipe for its summary are added.
        announce: called once, when all shards are ready.

    Returns:
        0 if all shards exited with 0. Else the code of the first shard, by its end and then by rank, that exited with
        another one than EXIT_SHARD_FAILED; EXIT_SHARD_FAILED if there is none, as after a shard that was killed;
        128 + SIGTERM if shards only died of the SIGTERM that they were sent while they started.
    """
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_ports(1)[0]), **os.environ}
    shards = ShardProcesses()
    codes: list[int] = []
    grace_s = 0.0
    with forwarded_signals(shards.terminate):
        try:
            for rank in range(num_shards):
                shards.start([*command, "--rank", str(rank)], environ)
            summaries = shards.read_summaries()
            if summaries is not None:
                announce(_join_summaries(summaries))
            codes = [shards.wait_for_first_end()]
            grace_s = _FAILED_END_S if codes[0] else _DRAINED_END_S
        finally:
            codes += shards.stop(grace_s)
    return shards.find_exit_code(codes)


def _join_summaries(summaries: Sequence[dict[str, Any]]) -> ServerSummary:
    """Combines the summaries of all shards: all addresses, and the sum of their bytes."""
    fields = {name: value for name, value in summaries[0].items() if name != "event"}
    fields["targets"] = tuple(target for summary in summaries for target in summary["targets"])
    fields["metrics_urls"] = tuple(url for summary in summaries for url in summary["metrics_urls"])
    fields["kv_bytes_total"] = sum(summary["kv_bytes_total"] for summary in summaries)
    return ServerSummary(**fields)
