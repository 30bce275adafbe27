"""The HTTP endpoint that Prometheus scrapes: GET /metrics and nothing else, on a separate thread."""

from __future__ import annotations

import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from pagedkv.adapters.rpc.sockets import parse_listen_address
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

PATH = "/metrics"
_CLIENT_TIMEOUT_S = 10.0
_MAX_PORT = 65535
_POLL_S = 0.1
"""How often the endpoint checks whether to stop."""


class MetricsEndpoint:
    """An HTTP endpoint of metrics. The constructor binds the port; `start` begins to answer, until `close`.

    Args:
        address: HOST:PORT; a shard uses PORT + rank, port 0 is any free one.
        rank: of this shard.

    Raises:
        ConfigError: the address can't be bound; the message says why.
    """

    def __init__(self, address: str, rank: int = 0) -> None:
        host, port = parse_listen_address(address)
        own_port = port + rank if port else 0
        if own_port > _MAX_PORT:
            raise ConfigError(f"metrics.listen is {address}: there is no port {port} + {rank} for rank {rank}")
        self.registry = CollectorRegistry(auto_describe=False)
        try:
            self._server = _Server(host.strip("[]"), own_port, self.registry)
        except OSError as error:
            raise ConfigError(
                f"can't serve metrics on {host}:{own_port}: {error.strerror or error}; set metrics.listen "
                '(--metrics-listen) to another address, or to "" for none'
            ) from error
        self.url = f"http://{host}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="pagedkv-metrics", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        logger.info("metrics on %s", self.url)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    allow_reuse_address = True  # Allows a port whose server has just ended; a port in use is still refused.

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S
    server_version = "pagedkv"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"only {PATH} is here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Logs nothing: a scrape comes every few seconds."""
