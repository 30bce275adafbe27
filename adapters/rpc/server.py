"""A gRPC server for any number of doors: sockets, TLS, the standard health service, reflection."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagedkv.adapters.rpc.sockets import claim_socket_path, owner_only_files, parse_listen_address, shard_path
from pagedkv.adapters.rpc.tls import read_server_credentials
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 1.0
"""How long finished responses may take to leave when the server stops."""

_MIN_PING_INTERVAL_MS = 4000
"""Clients that keep a silent connection alive ping every 5 to 30 s; gRPC's default sends them away after a few."""


class Door(Protocol):
    """A protocol that a server speaks."""

    @property
    def service_name(self) -> str:
        """Full name of its gRPC service, for health and reflection."""

    @property
    def handler(self) -> grpc.GenericRpcHandler: ...

    def find_health_fault(self) -> str | None:
        """Why no work should be sent through it; None while all is well. Waits for nothing."""


class GrpcServer:
    """Listens for doors.

    Args:
        config: addresses and limits. At least one of `uds_path` and `listen` is set.
        rank: of this shard; the socket is `uds_path-rank`.

    Raises:
        ConfigError: no address is set.
    """

    def __init__(self, config: ServerSection, rank: int = 0) -> None:
        if not config.uds_path and not config.listen:
            raise ConfigError("the server has no address: set server.uds_path or server.listen")
        self._config = config
        self._socket_path = shard_path(config.uds_path, rank) if config.uds_path else ""
        self._doors: Sequence[Door] = ()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self.tcp_address = ""
        """HOST:PORT once the server listens on TCP; with the real port if the config says port 0."""

    @property
    def targets(self) -> list[str]:
        """Addresses that a gRPC client can connect to."""
        addresses = [f"unix:{os.path.abspath(self._socket_path)}"] if self._socket_path else []
        return addresses + ([self.tcp_address] if self.tcp_address else [])

    def bind(self, doors: Sequence[Door]) -> None:
        """Takes the addresses, before anything is answered.

        Raises:
            ConfigError: an address can't be bound; the message says why.
        """
        self._doors = doors
        max_bytes = int(self._config.max_message_bytes)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", max_bytes),
                ("grpc.so_reuseport", 0),  # Two servers on one port would share its calls at random.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ]
        )
        server.add_generic_rpc_handlers(tuple(door.handler for door in doors))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*(door.service_name for door in doors), health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self._bind_addresses(server)
        self._server = server

    async def start(self) -> None:
        """Answers from now on. Call `bind` first."""
        assert self._server is not None
        await self.publish_health()
        await self._server.start()

    async def publish_health(self) -> None:
        """Copies the doors' health into the standard health service, which holds a status."""
        faults = {door.service_name: door.find_health_fault() for door in self._doors}
        kinds = health_pb2.HealthCheckResponse
        for name, fault in {**faults, "": next(filter(None, faults.values()), None)}.items():
            await self._health.set(name, kinds.SERVING if fault is None else kinds.NOT_SERVING)

    async def stop(self) -> None:
        """Closes the sockets; finished responses still leave. A second call does nothing."""
        if self._server is not None:
            await self._server.stop(grace=LAST_ANSWERS_S)

    def _bind_addresses(self, server: grpc.aio.Server) -> None:
        if self._socket_path:
            claim_socket_path(self._socket_path)
            with owner_only_files():
                _add_port(server, f"unix:{self._socket_path}")
            logger.info("listening on %s", self._socket_path)
        if self._config.listen:
            host, _ = parse_listen_address(self._config.listen)
            port = _add_port(server, self._config.listen, read_server_credentials(self._config))
            self.tcp_address = f"{host}:{port}"
            logger.info("listening on %s%s", self.tcp_address, " with TLS" if self._config.tls_cert else "")


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {address}: {error}") from error
    if port == 0:
        raise ConfigError(f"can't listen on {address}; is it in use, or another machine's?")
    return port
