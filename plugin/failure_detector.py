"""Detects at once that another shard has ended, failed or left.

Rank 0 has a TCP connection to every other rank. The operating system closes the connections of a process that dies, for
whatever reason, so the others notice at once. There is no heartbeat that a busy machine could delay too long.
A thread of each process listens. It also ends a step that takes too long, for example one that waits in a collective
for a shard that never joins it, so no timeout of a collective library is needed.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.plugin.shard_connections import connect_ranks

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

OnFailure = Callable[[str], None]
"""Called once, from any thread, with the reason why the shards can't continue."""

_LEFT = b"left"
_FAILED = b"failed "
_POLL_S = 0.1
_LEAVE_TIMEOUT_S = 5.0
_REPORT_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Peer:
    rank: int
    connection: socket.socket
    received: bytes = b""
    has_left: bool = False

    def tell(self, message: bytes) -> None:
        try:
            self.connection.sendall(message + b"\n")
        except OSError:
            logger.debug("rank %d no longer listens", self.rank)


class FailureDetector:
    """This process's end of the connections between shards.

    Args:
        rank: of this shard.
        peers: connected sockets by rank: all others on rank 0, rank 0 alone on the others.
        on_failure: what to do when a shard has failed, this one included.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], on_failure: OnFailure) -> None:
        self._rank = rank
        self._peers = [_Peer(peer, connection) for peer, connection in peers.items()]
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._failure = ""
        self._has_failed = threading.Event()
        self._leave_by_s: float | None = None
        self._deadline: tuple[float, str] | None = None
        self._thread = threading.Thread(target=self._listen, name="pagedkv-failure_detector", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why the shards can't continue; empty while they can."""
        return self._failure

    def departed_ranks(self) -> list[int]:
        """Ranks of the peers that have left without a failure."""
        return [peer.rank for peer in self._peers if peer.has_left]

    def fail(self, message: str) -> None:
        """Tells every shard that this one can't continue. Only the first failure is reported.

        Returns after the failure handler has returned, for every thread that calls it. Otherwise a second thread could
        end the process before the handler does, with another exit code.
        """
        with self._lock:
            if self._leave_by_s is not None:
                return
            is_first = not self._failure
            self._failure = self._failure or message
        if not is_first:
            self.wait_for_report()
            return
        self._tell(_FAILED + message.replace("\n", " ").encode())
        # First call the handler, then wake the threads that wait.
        self._on_failure(message)
        self._has_failed.set()

    def wait_for_report(self) -> bool:
        """Waits a moment for the report of another shard's end: a collective may fail before the report arrives."""
        return self._has_failed.wait(_REPORT_TIMEOUT_S)

    @contextmanager
    def time_limit(self, seconds: float, task: str) -> Iterator[None]:
        """Context manager that reports a failure if its body runs longer than `seconds`."""
        self._deadline = (time.monotonic() + seconds, f"{task} has taken more than {seconds:g} s on rank {self._rank}")
        try:
            yield
        finally:
            self._deadline = None

    def leave(self, failure: str = "") -> None:
        """Reports that this shard ends, in order or with a failure that ends the others, and closes its connections.

        Rank 0 first waits a while for the others to leave."""
        with self._lock:
            self._leave_by_s = time.monotonic() + (_LEAVE_TIMEOUT_S if self._rank == 0 else 0)
        self._tell(_FAILED + failure.replace("\n", " ").encode() if failure else _LEFT)
        self._thread.join()
        for peer in self._peers:
            peer.connection.close()

    def _tell(self, message: bytes) -> None:
        for peer in self._peers:
            peer.tell(message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while selector.get_map() and not (self._leave_by_s and time.monotonic() > self._leave_by_s):
                for key, _ in selector.select(_POLL_S):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                self._check_deadline()

    def _receive(self, peer: _Peer) -> bool:
        """Reads from a peer. Returns whether more data may come."""
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            peer.has_left |= line == _LEFT
            if line.startswith(_FAILED):
                self.fail(line.removeprefix(_FAILED).decode(errors="replace"))
        if not data and not peer.has_left:
            self.fail(f"rank {peer.rank} has ended unexpectedly; its own log says why")
        return bool(data)

    def _check_deadline(self) -> None:
        deadline = self._deadline
        if deadline is not None and time.monotonic() > deadline[0]:
            self.fail(
                f"{deadline[1]}: another shard hangs, or got other calls than this one (every call must reach all "
                "shards)"
            )


def connect_failure_detector(
    rank: int, num_shards: int, store: TCPStore, host: str, timeout_s: float, on_failure: OnFailure
) -> FailureDetector:
    """Connects this shard to the others. Every shard calls it at about the same time.

    Args:
        store: shared by the shards; holds the port that rank 0 listens on, and a secret that keeps other clients out.
        host: address of rank 0.

    Raises:
        ShardError: not all shards connected within `timeout_s`; the message names the missing ranks.
    """
    return FailureDetector(
        rank, connect_ranks("failure_detector", rank, num_shards, store, host, timeout_s), on_failure
    )
