"""A gRPC server around a `GenerationService`: sockets, reflection, the standard health service, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import grpc

from pagedkv.adapters.rpc.server import Door, GrpcServer
from pagedkv.adapters.rpc.sockets import shard_path
from pagedkv.adapters.tgi.call_order import OrderedStepLoop
from pagedkv.adapters.tgi.caller_rights import CallerRights
from pagedkv.adapters.tgi.ordered_service import OrderedService
from pagedkv.adapters.tgi.rpc import SERVICE, service_handler
from pagedkv.adapters.tgi.service import GenerationService
from pagedkv.adapters.tgi.step_loop import StepLoop
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.distributed import ShardGroup
from pagedkv.plugin.interface import Backend, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.observer import Observers
from pagedkv.plugin.serving.step_thread import StepThread

if TYPE_CHECKING:
    from typing_extensions import Self

_WATCH_INTERVAL_S = 0.25
_DRAIN_POLL_S = 0.02


class SecondDoor(Door, Protocol):
    """A door of another protocol to the same backend, beside ours."""

    @property
    def num_requests(self) -> int: ...

    async def open(self, capacity: Capacity) -> None:
        """Called after each warm-up."""

    def begin_drain(self) -> None: ...

    async def close(self) -> None: ...


class GenerationServer:
    """Serves a backend as `generate.v3`.

        async with GenerationServer(backend, tokenizer, config.server) as server:
            await server.warm_up(WarmupLimits())
            await until_told_to_stop
            await server.drain(config.server.drain_timeout_s)

    Only the server may call the backend until `stop` has returned. The caller closes the backend after that.

    Args:
        backend: loaded; a client's Warmup, or `warm_up`, makes it healthy.
        tokenizer: of the backend's model.
        config: addresses and limits. At least one of `uds_path` and `listen` is set.
        rank, num_shards: this server's place among the shards of one model; the socket is `uds_path-rank`.
        observers: as in `GenerationService`.
        group: of the shards, where there are several: its connections give calls one order on all of them.
        on_drain: called when another shard was asked to drain, which means all; call `drain` then.
        thread: of the backend, on which all its calls run; None makes one.
        second_door: served on the same addresses.

    Raises:
        ConfigError: no address is set.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: ServerSection,
        *,
        rank: int = 0,
        num_shards: int = 1,
        observers: Observers | None = None,
        group: ShardGroup | None = None,
        on_drain: Callable[[], None] = lambda: None,
        thread: StepThread | None = None,
        second_door: SecondDoor | None = None,
    ) -> None:
        self._server = GrpcServer(config, rank)
        self._second_door = second_door
        step_loop = OrderedStepLoop(thread) if group else None
        self.service = GenerationService(
            backend,
            tokenizer,
            urls=[f"unix://{shard_path(config.uds_path, i)}" for i in range(num_shards)] if config.uds_path else [],
            has_chunked_prefill=config.chunked_prefill,
            stuck_step_timeout_s=config.stuck_step_timeout_s,
            cache_salt_metadata_key=config.cache_salt_metadata_key,
            tells_refusal_reason=config.refusal_text == "reason",
            tells_cached_tokens=config.cached_tokens_trailer and not config.cache_salt_metadata_key,
            rank=rank,
            num_shards=num_shards,
            abandoned_batch_timeout_s=config.abandoned_batch_timeout_s,
            has_prompts_in_log=config.log_prompts,
            observers=observers,
            step_loop=step_loop or StepLoop(thread),
            on_warm=second_door.open if second_door else None,
        )
        self._ordered = OrderedService(self.service, step_loop, group, on_drain) if group and step_loop else None
        keeps_apart = bool(config.listen and (config.cache_salt_metadata_key or config.tls_client_ca))
        # Shards listen on Unix sockets alone, which may do everything.
        self._rights = (
            CallerRights(self.service, self.service.is_live, config.cache_salt_metadata_key) if keeps_apart else None
        )
        self._watcher: asyncio.Task[None] | None = None

    @property
    def targets(self) -> list[str]:
        """Addresses that a gRPC client can connect to."""
        return self._server.targets

    @property
    def tcp_address(self) -> str:
        """HOST:PORT once the server listens on TCP; else empty."""
        return self._server.tcp_address

    @property
    def service_name(self) -> str:
        return SERVICE.full_name

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        return service_handler(self._rights or self._ordered or self.service)

    def find_health_fault(self) -> str | None:
        """Calls `GenerationService.find_health_fault`."""
        return self.service.find_health_fault()

    async def start(self) -> None:
        """Binds the sockets and starts to answer calls. New requests are refused until the warm-up.

        Raises:
            ConfigError: an address can't be bound; the message says why.
        """
        doors: Sequence[Door] = [self, *([self._second_door] if self._second_door else [])]
        self._server.bind(doors)
        self.service.urls = self.service.urls or [self._server.tcp_address]
        if self._ordered:
            await self._ordered.open()
        await self._server.start()
        self._watcher = asyncio.create_task(self._watch())

    async def warm_up(self, limits: WarmupLimits) -> Capacity:
        """Calls `GenerationService.warm_up`, for a server without a router to send a Warmup."""
        return await (self._ordered or self.service).warm_up(limits)

    async def drain(self, timeout_s: float) -> bool:
        """Fails Health and refuses new requests, and waits until the running ones have ended.

        Returns:
            Whether all of them ended within `timeout_s`. `stop` ends the others.
        """
        if self._ordered:
            await self._ordered.begin_drain()
            await self._server.publish_health()
            return await self._ordered.wait_until_drained(timeout_s)
        self.service.begin_drain()
        if self._second_door:
            self._second_door.begin_drain()
        await self._server.publish_health()
        deadline_s = time.monotonic() + timeout_s
        while self._num_requests and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self._num_requests == 0

    async def stop(self) -> None:
        """Ends running requests and closes the sockets. Sends finished responses. A second call does nothing."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._server.stop()
        if self._second_door:
            await self._second_door.close()
        if self._ordered:
            self._ordered.close()
        await self.service.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def _num_requests(self) -> int:
        return self.service.num_requests + (self._second_door.num_requests if self._second_door else 0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            await (self._ordered or self.service).end_abandoned()
            await self.service.check_when_idle()
            await self._server.publish_health()
