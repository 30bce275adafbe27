"""A gRPC server around a `GenerationService`: sockets, reflection, the standard health service, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagedkv.adapters.tgi.call_order import OrderedStepLoop
from pagedkv.adapters.tgi.ordered_service import OrderedService
from pagedkv.adapters.tgi.rpc import SERVICE, service_handler
from pagedkv.adapters.tgi.service import GenerationService
from pagedkv.adapters.tgi.sockets import claim_socket_path, owner_only_files, parse_listen_address, shard_path
from pagedkv.adapters.tgi.tls import read_server_credentials
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.distributed import ShardGroup
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Backend, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.observer import Observers

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.25
_DRAIN_POLL_S = 0.02
_LAST_ANSWERS_S = 1.0


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
    ) -> None:
        if not config.uds_path and not config.listen:
            raise ConfigError("the server has no address: set server.uds_path or server.listen")
        self._config = config
        self._socket_path = shard_path(config.uds_path, rank) if config.uds_path else ""
        self.tcp_address = ""
        """HOST:PORT once the server listens on TCP; with the real port if the config says port 0."""
        step_loop = OrderedStepLoop() if group else None
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
            step_loop=step_loop,
        )
        self._ordered = OrderedService(self.service, step_loop, group, on_drain) if group and step_loop else None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def targets(self) -> list[str]:
        """Addresses that a gRPC client can connect to."""
        addresses = [f"unix:{os.path.abspath(self._socket_path)}"] if self._socket_path else []
        return addresses + ([self.tcp_address] if self.tcp_address else [])

    async def start(self) -> None:
        """Binds the sockets and starts to answer calls. New requests are refused until the warm-up.

        Raises:
            ConfigError: an address can't be bound; the message says why.
        """
        max_bytes = int(self._config.max_message_bytes)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", max_bytes),
                ("grpc.so_reuseport", 0),  # Two servers on one port would share its calls at random.
            ]
        )
        server.add_generic_rpc_handlers((service_handler(self._ordered or self.service),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._publish_health()
        self._bind(server)
        self._server = server
        if self._ordered:
            await self._ordered.open()
        await server.start()
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
            await self._publish_health()
            return await self._ordered.wait_until_drained(timeout_s)
        self.service.begin_drain()
        await self._publish_health()
        deadline_s = time.monotonic() + timeout_s
        while self.service.num_requests and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.service.num_requests == 0

    async def stop(self) -> None:
        """Ends running requests and closes the sockets. Sends finished responses. A second call does nothing."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            await self._server.stop(grace=_LAST_ANSWERS_S)
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

    def _bind(self, server: grpc.aio.Server) -> None:
        if self._socket_path:
            claim_socket_path(self._socket_path)
            with owner_only_files():
                _add_port(server, f"unix:{self._socket_path}")
            logger.info("listening on %s", self._socket_path)
        if self._config.listen:
            host, _ = parse_listen_address(self._config.listen)
            port = _add_port(server, self._config.listen, read_server_credentials(self._config))
            self.tcp_address = f"{host}:{port}"
            self.service.urls = self.service.urls or [self.tcp_address]
            logger.info("listening on %s%s", self.tcp_address, " with TLS" if self._config.tls_cert else "")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            await (self._ordered or self.service).end_abandoned()
            await self.service.check_when_idle()
            await self._publish_health()

    async def _publish_health(self) -> None:
        """Copies the result of Health into the standard health service, at regular intervals."""
        is_serving = self.service.find_health_fault() is None
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if is_serving else kinds.NOT_SERVING
        for name in ("", SERVICE.full_name):
            await self._health.set(name, status)


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {address}: {error}") from error
    if port == 0:
        raise ConfigError(f"can't listen on {address}; is it in use, or another machine's?")
    return port
