"""A gRPC server with the SMG worker as its only door."""

from __future__ import annotations

import asyncio
import time

from pagedkv.adapters.rpc.server import GrpcServer
from pagedkv.adapters.smg.door import SmgDoor
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.interface import Backend, Capacity, WarmupLimits
from pagedkv.plugin.serving.step_thread import StepThread

_HEALTH_INTERVAL_S = 0.25
_DRAIN_POLL_S = 0.02


class SmgServer:
    """Listens only once the backend is warm.

    Args:
        backend: loaded. Its calls run on `thread`.
        thread: of the backend.
        door: of the backend.
        config: addresses and limits.
    """

    def __init__(self, backend: Backend, thread: StepThread, door: SmgDoor, config: ServerSection) -> None:
        self._backend = backend
        self._thread = thread
        self.service = door
        self._server = GrpcServer(config)
        self._health: asyncio.Task[None] | None = None

    @property
    def targets(self) -> list[str]:
        """Addresses that a gRPC client can connect to."""
        return self._server.targets

    async def start(self) -> None:
        """Takes the addresses. Nothing is answered before the warm-up.

        Raises:
            ConfigError: an address can't be bound; the message says why.
        """
        self._server.bind([self.service])

    async def warm_up(self, limits: WarmupLimits) -> Capacity:
        """Sizes the cache, and answers from then on. Raises as `Backend.warmup` does."""
        capacity = await asyncio.wrap_future(self._thread.submit(lambda: self._backend.warmup(limits)))
        await self.service.open(capacity)
        await self._server.start()
        self._health = asyncio.create_task(self._watch_health())
        return capacity

    async def drain(self, timeout_s: float) -> bool:
        """Fails health and refuses new requests, and waits until the running ones have ended.

        Returns:
            Whether all of them ended within `timeout_s`. `stop` ends the others.
        """
        self.service.begin_drain()
        await self._server.publish_health()
        deadline_s = time.monotonic() + timeout_s
        while self.service.num_requests and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.service.num_requests == 0

    async def stop(self) -> None:
        """Ends running requests and closes the sockets. A second call does nothing."""
        if self._health is not None:
            self._health.cancel()
        await self._server.stop()
        await self.service.close()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            await self._server.publish_health()
