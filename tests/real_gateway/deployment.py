"""Starts and ends pagedkv workers and the real SMG gateway in front of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.integration.serve.child_process import ChildServer, child_server

PROGRAM_VARIABLE = "PAGEDKV_SMG_PROGRAM"
START_TIMEOUT_S = 300
WAIT_TIMEOUT_S = 60
_POLL_S = 0.05
_LOG_TAIL_CHARS = 4000
_HTTP = httpx2.Client(timeout=300, trust_env=False)

QUICK_FLAGS = (
    *("--worker-startup-check-interval", "1"),
    *("--health-check-interval-secs", "1"),
    *("--load-monitor-interval", "1"),
    *("--shutdown-grace-period-secs", "1"),
)
"""So that tests see within seconds what takes minutes by default."""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Raises AssertionError where the condition does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(_POLL_S)


def free_ports(num_ports: int) -> list[int]:
    """Different ones that nothing listens on."""
    sockets = [socket.socket() for _ in range(num_ports)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def read_metrics(url: str) -> list[Any]:
    """All samples of a scrape."""
    return [sample for family in text_string_to_metric_families(_HTTP.get(url).text) for sample in family.samples]


@dataclass
class Worker:
    """A `pagedkv serve --protocol smg` that can be ended and started again on the same address."""

    model: Path
    folder: Path
    settings: Sequence[str]
    port: int
    metrics_port: int
    environ: Mapping[str, str] = field(default_factory=dict)
    server: ChildServer | None = None
    _running: AbstractContextManager[ChildServer] | None = field(default=None, init=False)
    _num_starts: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once it serves."""
        self._num_starts += 1
        settings = [part for setting in self.settings for part in ("--set", setting)]
        command = [str(self.model), "--protocol", "smg", "--listen", f"127.0.0.1:{self.port}", *settings]
        environ = {"PAGEDKV_METRICS_LISTEN": f"127.0.0.1:{self.metrics_port}", **self.environ}
        log = self.folder / f"worker-{self.port}-{self._num_starts}.log"
        self._running = child_server(command, log, environ=environ)
        self.server = self._running.__enter__()

    def end(self, signal_number: int = signal.SIGTERM) -> None:
        """Returns once it has ended; SIGTERM lets running answers finish."""
        self.send(signal_number)
        self.wait()

    def send(self, signal_number: int) -> None:
        assert self.server is not None
        self.server.process.send_signal(signal_number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self.server is not None
        return int(self.server.process.wait(WAIT_TIMEOUT_S))

    def close(self) -> None:
        """Leaves no process behind."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that have these labels."""
        samples = read_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics")
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_until_idle(self) -> None:
        """Raises AssertionError where a request or a block that one holds stays."""
        gauges = ("pagedkv_requests_running", "pagedkv_requests_waiting")
        wait_for(
            lambda: (
                not any(self.metric(name) for name in gauges) and not self.metric("pagedkv_cache_blocks", state="used")
            ),
            "worker without requests and used blocks",
        )


@dataclass
class Gateway:
    """An unmodified `smg launch` that can be ended and started again on the same address."""

    program: str
    folder: Path
    workers: Sequence[Worker]
    flags: Sequence[str]
    port: int
    metrics_port: int
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"gateway-{self.port}.log"

    def start(self) -> None:
        """Returns once it has registered every worker."""
        command = [self.program, "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port)]
        command += ["--worker-urls", *(worker.url for worker in self.workers), "--log-level", "warn", *self.flags]
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environment |= {"HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )
        wait_for(self._is_ready, "gateway ready", START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-_LOG_TAIL_CHARS:]
        try:
            return _HTTP.get(f"{self.url}/readiness").status_code == httpx2.codes.OK and (
                self.num_ready_workers() == len(self.workers)
            )
        except httpx2.TransportError:
            return False

    def num_ready_workers(self) -> int:
        workers = _HTTP.get(f"{self.url}/workers").json()["workers"]
        return sum(worker.get("status", "ready") == "ready" for worker in workers)

    def end(self) -> None:
        """Leaves no process behind."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer."""
        response = _HTTP.post(self.url + path, json=body)
        try:
            return response.status_code, response.json()
        except json.JSONDecodeError:
            return response.status_code, response.text

    def get(self, path: str) -> Any:
        return _HTTP.get(self.url + path).json()

    def metric(self, name: str, **labels: str) -> float:
        samples = read_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics")
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@dataclass(frozen=True)
class Launch:
    """Starts deployments with their logs in a folder.

    Args:
        program: `smg`.
        folder: for logs.
    """

    program: str
    folder: Path

    @contextmanager
    def deployment(
        self,
        model: Path,
        *,
        num_workers: int = 1,
        settings: Sequence[str] = (),
        flags: Sequence[str] = QUICK_FLAGS,
        environ: Mapping[str, str] | None = None,
    ) -> Iterator[Gateway]:
        """Workers of one model behind a gateway; all of it has ended afterwards."""
        ports = free_ports(2 * num_workers + 2)
        pairs = zip(ports[2::2], ports[3::2], strict=True)
        workers = [Worker(model, self.folder, settings, port, metrics, environ or {}) for port, metrics in pairs]
        gateway = Gateway(self.program, self.folder, workers, flags, ports[0], ports[1])
        try:
            for worker in workers:
                worker.start()
            gateway.start()
            yield gateway
        finally:
            gateway.end()
            for worker in workers:
                worker.close()
