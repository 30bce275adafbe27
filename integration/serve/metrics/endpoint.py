"""The HTTP endpoint on separate threads: GET /metrics for Prometheus, GET /healthz for load balancers, nothing else."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from pagedkv.adapters.rpc.sockets import parse_listen_address
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
_CLIENT_TIMEOUT_S = 10.0
_MAX_CLIENTS = 16
"""Further connections are closed at once, so that clients that stay connected can't pile up threads."""
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
        self.find_health_fault: Callable[[], str | None] = lambda: "the server is starting"
        """Why the server is not healthy, or None: the answer of HEALTH_PATH. Set it once there is a service."""
        try:
            self._server = _Server(host.strip("[]"), own_port)
        except OSError as error:
            raise ConfigError(
                f"can't serve metrics on {host}:{own_port}: {error.strerror or error}; set metrics.listen "
                '(--metrics-listen) to another address, or to "" for none'
            ) from error
        self._server.set_app(self._answer)
        self._answer_metrics = make_wsgi_app(self.registry)
        self.url = f"http://{host}:{self._server.server_address[1]}{METRICS_PATH}"
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

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """The WSGI application."""

        def start(status: str, headers: list[tuple[str, str]]) -> Any:
            return start_response(status, [*headers, ("Server", "pagedkv")])

        path = environ["PATH_INFO"]
        if path == METRICS_PATH:
            return self._answer_metrics(environ, start)
        status, text = "404 Not Found", f"only {METRICS_PATH} and {HEALTH_PATH} are here"
        if path == HEALTH_PATH:
            fault = self.find_health_fault()
            status, text = ("200 OK", "ok") if fault is None else ("503 Service Unavailable", fault)
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode() + b"\n"]


class _Server(ThreadingWSGIServer):
    allow_reuse_address = True  # Allows a port whose server has just ended; a port in use is still refused.

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free_clients = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # The base class asks DNS for this machine's name, which can take many seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_clients.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Logs nothing: a scrape comes every few seconds."""
