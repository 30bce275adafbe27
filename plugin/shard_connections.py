"""TCP connections between the shards of a model: one from rank 0 to each other rank."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from pagedkv.plugin.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_MAX_GREETING_BYTES = 64
_GREETING_TIMEOUT_S = 2.0
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""Seconds and tries after which a machine that does not answer counts as gone."""


def connect_ranks(
    purpose: str, rank: int, num_shards: int, store: TCPStore, host: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Connects this shard. Every shard calls it at about the same time.

    Args:
        purpose: names the connections in the store; each purpose has connections of its own.
        store: shared by the shards; holds the port that rank 0 listens on, and a secret that keeps others out.
        host: where rank 0 is.

    Returns:
        Connected blocking sockets by rank: all others on rank 0, rank 0 alone on the others.

    Raises:
        ShardError: not all are connected within `timeout_s`; the text names the missing ranks.
    """
    key = f"pagedkv/{purpose}"
    if rank == 0:
        connections = _accept(key, num_shards, store, host, timeout_s)
    else:
        connections = {0: _call(key, rank, store, host, timeout_s)}
    for connection in connections.values():
        connection.settimeout(None)
        # Messages are small and urgent.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
    return connections


def _accept(key: str, num_shards: int, store: TCPStore, host: str, timeout_s: float) -> dict[int, socket.socket]:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    secret = secrets.token_hex(16)
    peers: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + timeout_s
    with socket.create_server((host, 0), family=family) as listener:
        store.set(key, f"{listener.getsockname()[1]} {secret}")
        while len(peers) < num_shards - 1:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = _name_ranks(set(range(1, num_shards)) - set(peers))
                raise ShardError(f"{missing} did not join within {timeout_s:g} s; see the log there") from None
            caller = _read_greeting(connection, secret)
            if caller is None or caller in peers or caller not in range(1, num_shards):
                connection.close()
            else:
                peers[caller] = connection
    return peers


def _read_greeting(connection: socket.socket, secret: str) -> int | None:
    """Returns the rank of a caller that knows the secret; None for any other."""
    connection.settimeout(_GREETING_TIMEOUT_S)
    try:
        line = b""
        while not line.endswith(b"\n") and len(line) < _MAX_GREETING_BYTES:
            # Read one byte at a time: what follows the line is a message already.
            line += (byte := connection.recv(1))
            if not byte:
                return None
        said, _, rank = line.decode().strip().partition(" ")
        return int(rank) if hmac.compare_digest(said.encode(), secret.encode()) else None
    except (OSError, ValueError):
        return None


def _call(key: str, rank: int, store: TCPStore, host: str, timeout_s: float) -> socket.socket:
    try:
        port, secret = store.get(key).decode().split(" ")
        connection = socket.create_connection((host, int(port)), timeout_s)
        connection.sendall(f"{secret} {rank}\n".encode())
    except (OSError, RuntimeError) as error:  # the store's own errors are RuntimeErrors
        raise ShardError(f"rank {rank} can't reach rank 0 on {host}: {error}") from error
    return connection


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _name_ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
