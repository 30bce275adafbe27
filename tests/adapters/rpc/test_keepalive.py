"""Pings on a silent connection, in plain HTTP/2: who keeps it alive is borne, a flood is sent away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import grpc
import pytest

from pagedkv.adapters.rpc import server as rpc_server
from pagedkv.plugin.config import ServerSection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
MIN_INTERVAL_MS = 100
TIMEOUT_S = 20.0


class NoDoor:
    service_name = "pagedkv.test.Nothing"
    handler = grpc.method_handlers_generic_handler(service_name, {})

    def find_health_fault(self) -> str | None:
        return None


class Connection:
    """As much of HTTP/2 as a client needs that only pings."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._socket.sendall(PREFACE + frame(SETTINGS))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ping(self) -> None:
        self._send(frame(PING, payload=bytes(8)))

    def read_until(self, kind: int) -> tuple[int, bytes]:
        """The next frame of this kind or GOAWAY: its kind and payload. GOAWAY, too, where the server has closed."""
        while True:
            header = self._read(9)
            if not header:
                return GOAWAY, b""
            found, flags = header[3], header[4]
            payload = self._read(int.from_bytes(header[:3], "big"))
            if found == SETTINGS and not flags & ACK:
                self._send(frame(SETTINGS, flags=ACK))
            if found in (kind, GOAWAY):
                return found, payload

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # closed: what was said before can still be read
            self._socket.sendall(data)

    def _read(self, num_bytes: int) -> bytes:
        """Empty where the server has closed the connection."""
        data = b""
        while len(data) < num_bytes:
            try:
                piece = self._socket.recv(num_bytes - len(data))
            except ConnectionResetError:
                return b""
            if not piece:
                return b""
            data += piece
        return data


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server whose least interval is short, so that the test is."""
    bound: Future[str] = Future()
    ended = threading.Event()

    async def serve() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc_server, "_MIN_PING_INTERVAL_MS", MIN_INTERVAL_MS)
            server = rpc_server.GrpcServer(ServerSection(listen="127.0.0.1:0"))
            server.bind([NoDoor()])
        await server.start()
        bound.set_result(server.tcp_address)
        await asyncio.to_thread(ended.wait)
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield bound.result(TIMEOUT_S)
    ended.set()
    thread.join()


def test_a_client_that_keeps_a_silent_connection_alive_is_not_sent_away(address: str) -> None:
    with Connection(address) as connection:
        for _ in range(8):
            time.sleep(1.5 * MIN_INTERVAL_MS / 1000)
            connection.ping()
            kind, _payload = connection.read_until(PING)
            assert kind == PING


def test_a_flood_of_pings_is_sent_away(address: str) -> None:
    with Connection(address) as connection:
        for _ in range(50):
            connection.ping()
        kind, payload = connection.read_until(GOAWAY)
    assert kind == GOAWAY
    assert payload[8:] in (b"too_many_pings", b"")


def test_the_interval_is_shorter_than_any_known_client_s() -> None:
    assert rpc_server._MIN_PING_INTERVAL_MS < 5000
