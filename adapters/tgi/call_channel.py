"""Messages between the shards of a model, over the connections from rank 0 to each other rank, on one event loop.

A message is a small JSON header and bytes. Each connection delivers messages whole and in the order in which they were
sent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Receive = Callable[[list[Any], bytes], None]
"""Called with the header and the bytes of each message, on the event loop."""

_LENGTH_BYTES = 4
_MAX_WAIT_S = 0.05
_CLOSING = ["closing"]
"""Header of the last message of an end that closes in order."""


class CallChannel:
    """One shard's ends of the connections.

    Args:
        connections: connected sockets by rank. The channel owns them once it is open.
        on_lost: called, on the event loop, with the rank whose connection ended while the channel was open.
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_lost: Callable[[int], None]) -> None:
        self._connections = connections
        self._on_lost = on_lost
        self._transports: list[asyncio.Transport] = []
        self._unsent: list[bytes] = []
        self._is_flush_near = False
        self._is_flush_planned = False

    async def open(self, receive: Receive) -> None:
        """Starts to receive; messages that arrived before are delivered now."""
        loop = asyncio.get_running_loop()
        for rank, connection in self._connections.items():
            make = functools.partial(_Frames, receive, functools.partial(self._report_loss, rank))
            transport, _ = await loop.create_connection(make, sock=connection)
            self._transports.append(transport)

    def send(self, header: Sequence[Any], content: bytes = b"", *, can_wait: bool = False) -> None:
        """Sends a message to every connected rank, behind all before it. Returns at once.

        Args:
            can_wait: for the next message, or a moment: each wake-up costs the other side time.
        """
        head = json.dumps(header, separators=(",", ":")).encode()
        lengths = len(head).to_bytes(_LENGTH_BYTES, "big") + len(content).to_bytes(_LENGTH_BYTES, "big")
        self._unsent += lengths, head, content
        if not can_wait and not self._is_flush_near:
            # What follows within this turn of the event loop leaves with it.
            self._is_flush_near = True
            asyncio.get_running_loop().call_soon(self._flush)
        elif can_wait and not self._is_flush_planned:
            self._is_flush_planned = True
            asyncio.get_running_loop().call_later(_MAX_WAIT_S, self._flush_late)

    def close(self) -> None:
        """Closes the connections, after what is queued has been sent: no loss for the others. A second call does
        nothing."""
        self.send(_CLOSING)
        self._flush()
        transports, self._transports = self._transports, []
        for transport in transports:
            transport.close()

    def _flush_late(self) -> None:
        self._is_flush_planned = False
        self._flush()

    def _flush(self) -> None:
        self._is_flush_near = False
        if not self._unsent:
            return
        data, self._unsent = b"".join(self._unsent), []
        for transport in self._transports:
            transport.write(data)

    def _report_loss(self, rank: int) -> None:
        if self._transports:
            self._on_lost(rank)


class _Frames(asyncio.Protocol):
    def __init__(self, receive: Receive, on_lost: Callable[[], None]) -> None:
        self._receive = receive
        self._on_lost = on_lost
        self._received = bytearray()
        self._is_closing = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (frame := self._take_frame()) is not None:
            header, content = json.loads(frame[0]), frame[1]
            self._is_closing |= header == _CLOSING
            if not self._is_closing:
                self._receive(header, content)

    def _take_frame(self) -> tuple[bytes, bytes] | None:
        received = self._received
        if len(received) < 2 * _LENGTH_BYTES:
            return None
        head = int.from_bytes(received[:_LENGTH_BYTES], "big")
        body = int.from_bytes(received[_LENGTH_BYTES : 2 * _LENGTH_BYTES], "big")
        start, end = 2 * _LENGTH_BYTES, 2 * _LENGTH_BYTES + head + body
        if len(received) < end:
            return None
        frame = bytes(received[start : start + head]), bytes(received[start + head : end])
        del received[:end]
        return frame

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_closing:
            self._on_lost()
