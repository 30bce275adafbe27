"""Starts and ends the real launcher and router of text-generation-inference, with pagedkv as their model server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import transformers
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.integration.serve.launcher_shim import SHIM_NAME, write_shim

PROGRAMS_VARIABLE = "PAGEDKV_ROUTER_PROGRAMS"
LAUNCHER, ROUTER = "text-generation-launcher", "text-generation-router"
START_TIMEOUT_S = 600
END_TIMEOUT_S = 150
_POLL_S = 0.1
_HTTP = httpx2.Client(timeout=30, trust_env=False, verify=False)
"""One for all: each of its own would read the system's certificates first."""
_LOG_TAIL_CHARS = 6000
_ANSI_CODE = re.compile(r"\x1b\[[0-9;]*m")
_SYSTEM_PATH = "/usr/bin:/bin"
"""For the compiler of the cpu kernels; a `text-generation-server` is not there."""
_LEFT_OUT_VARIABLES = re.compile(r"PAGEDKV_|PYTEST_|PYTHONPATH$|HF_|CUDA_|OMP_NUM_THREADS$|(HTTPS?|ALL)_PROXY$", re.I)
_GAUGE_NAMES = {"waiting": "pagedkv_requests_waiting", "running": "pagedkv_requests_running"}


class EndedError(AssertionError):
    """A program ended that should have run on."""


@dataclass
class Program:
    """A process with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path
    code: int | None = field(default=None, init=False)

    def text(self) -> str:
        """All that it has written so far, without colours."""
        return _ANSI_CODE.sub("", self.log.read_text(encoding="utf-8", errors="replace"))

    def assert_running(self) -> None:
        if self.process.poll() is not None:
            tail = self.text()[-_LOG_TAIL_CHARS:]
            raise EndedError(f"{self.log.stem} ended with code {self.process.returncode}; its log ends with:\n{tail}")

    def terminate(self) -> int:
        """Sends SIGTERM where it still runs, waits for its end and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_TIMEOUT_S)


@dataclass
class Deployment:
    """A router that answers HTTP, and the shards behind it."""

    program: Program
    """The launcher; or the router, where each program was started by itself."""
    url: str
    shard_sockets: list[Path]
    metrics_urls: list[str]
    """One a shard."""
    shards: list[Program] = field(default_factory=list)
    """Where each program was started by itself."""

    def metric(self, name: str, rank: int = 0, **labels: str) -> float:
        """Sum of a metric's samples that carry the labels, from a scrape of a shard."""
        text = _HTTP.get(self.metrics_urls[rank]).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_until_idle(self, timeout_s: float = 60) -> None:
        """Waits until no shard has a request or a block in use. Raises AssertionError where one stays."""
        deadline_s = time.monotonic() + timeout_s
        while left := self._what_is_left():
            assert time.monotonic() < deadline_s, f"still there: {left}"
            time.sleep(_POLL_S)

    def _what_is_left(self) -> dict[str, float]:
        found = {}
        for rank in range(len(self.metrics_urls)):
            found[f"blocks in use on rank {rank}"] = self.metric("pagedkv_cache_blocks", rank, state="used")
            for name, metric in _GAUGE_NAMES.items():
                found[f"requests {name} on rank {rank}"] = self.metric(metric, rank)
        return {name: value for name, value in found.items() if value}

    def shard_processes(self) -> list[psutil.Process]:
        """Of the launcher's children, those that serve."""
        children = psutil.Process(self.program.process.pid).children()
        return [child for child in children if any(SHIM_NAME in part for part in child.cmdline())]


@dataclass(frozen=True)
class Launch:
    """Starts deployments with their files below a folder.

    Args:
        programs: folder with the launcher and the router.
        folder: for sockets, logs and working directories.
    """

    programs: Path
    folder: Path

    @contextmanager
    def launcher(
        self, model: Path, *flags: str, num_shards: int = 1, settings: Mapping[str, str] | None = None
    ) -> Iterator[Deployment]:
        """The launcher with nothing on its PATH but our command, the two programs and the system's.

        Ends it by SIGTERM and asserts that it ends with code 0, unless the test has ended it.

        Args:
            flags: of the launcher, beside addresses and the model.
            settings: variables of pagedkv and of its libraries.

        Raises:
            EndedError: the launcher ended before the router answered.
        """
        folder = self._new_folder()
        port, metrics_port = free_port(), free_port(num_shards)
        sharded = ["--num-shard", str(num_shards)] if num_shards > 1 else []
        command = [self.programs / LAUNCHER, "--model-id", model, *sharded, *_addresses(port), *flags]
        command += ["--shard-uds-path", folder / "shard", "--master-port", str(free_port())]
        environment = self._environment(folder, metrics_port, settings)
        with _started("launcher", command, folder, environment) as program:
            sockets = [folder / f"shard-{rank}" for rank in range(num_shards)]
            urls = [f"http://127.0.0.1:{metrics_port + rank}/metrics" for rank in range(num_shards)]
            deployment = Deployment(program, f"http://127.0.0.1:{port}", sockets, urls)
            _wait_until_healthy(deployment)
            yield deployment
            if program.process.poll() is None:
                assert program.terminate() == 0, program.text()[-_LOG_TAIL_CHARS:]

    @contextmanager
    def each_by_itself(
        self, model: Path, *router_flags: str, settings: Mapping[str, str] | None = None
    ) -> Iterator[Deployment]:
        """One server and one router without a launcher, so that the server's exit code can be read."""
        folder = self._new_folder()
        port, metrics_port = free_port(), free_port()
        environment = self._environment(folder, metrics_port, settings)
        serve = [folder / "bin" / SHIM_NAME, "serve", model, "--uds-path", folder / "shard"]
        serve += ["--logger-level", "INFO", "--json-output", "--otlp-service-name", "tgi.server"]
        route = [folder / "bin" / ROUTER, "--master-shard-uds-path", folder / "shard-0", "--tokenizer-name", model]
        route += [*_addresses(port), *router_flags]
        with ExitStack() as stack:
            server = stack.enter_context(_started("server", serve, folder, environment))
            _wait_for(lambda: (folder / "shard-0").exists(), server)
            router = stack.enter_context(_started("router", route, folder, environment))
            urls = [f"http://127.0.0.1:{metrics_port}/metrics"]
            deployment = Deployment(router, f"http://127.0.0.1:{port}", [folder / "shard-0"], urls, [server])
            _wait_until_healthy(deployment)
            yield deployment

    def run_until_end(self, model: Path, *flags: str, settings: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit code and output of a launcher that is to end by itself."""
        folder = self._new_folder()
        command = [self.programs / LAUNCHER, "--model-id", model, *_addresses(free_port()), *flags]
        command += ["--shard-uds-path", folder / "shard", "--master-port", str(free_port())]
        with _started("launcher", command, folder, self._environment(folder, free_port(), settings)) as program:
            return program.process.wait(START_TIMEOUT_S), program.text()

    def _new_folder(self) -> Path:
        """Short, because a socket's path has at most some hundred bytes."""
        number = len(list(self.folder.iterdir()))
        folder = self.folder / f"run{number}"
        folder.mkdir()
        return folder

    def _environment(self, folder: Path, metrics_port: int, settings: Mapping[str, str] | None) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not _LEFT_OUT_VARIABLES.match(name)}
        commands = folder / "bin"
        write_shim(commands, sys.executable)
        _write_router_command(commands, self.programs)
        return {
            **own,
            "PATH": f"{commands}:{self.programs}:{_SYSTEM_PATH}",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",  # Shards and tests share the cores; threads that wait for each other only cost.
            "PAGEDKV_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
            **(settings or {}),
        }


def _write_router_command(folder: Path, programs: Path) -> None:
    """The router embeds a Python of the system's, which must find transformers: in its environment alone, because the
    launcher hands its own to everything."""
    libraries = Path(transformers.__file__).parents[1]
    path = folder / ROUTER
    path.write_text(f"#!/bin/sh\nPYTHONPATH='{libraries}' exec '{programs / ROUTER}' \"$@\"\n")
    path.chmod(0o755)


def _addresses(port: int) -> list[str]:
    prometheus = ["--prometheus-port", str(free_port())]
    return ["--hostname", "127.0.0.1", "--port", str(port), *prometheus, "--usage-stats", "off"]


def free_port(num_ports: int = 1) -> int:
    """The first of so many ports in a row that nothing listens on."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for offset in range(1, num_ports):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def _started(name: str, command: Sequence[object], folder: Path, environment: Mapping[str, str]) -> Iterator[Program]:
    """Runs a command in the folder, its output in NAME.log there. Leaves nothing of it behind."""
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=dict(environment),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Program(process, log)
    finally:
        _kill_with_descendants(process)


def _kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """The launcher's children are in process groups of their own and outlive it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def _wait_until_healthy(deployment: Deployment) -> None:
    def is_healthy() -> bool:
        try:
            return _HTTP.get(f"{deployment.url}/health").status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False

    _wait_for(is_healthy, deployment.program)


def _wait_for(condition: Callable[[], bool], program: Program) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        program.assert_running()
        assert time.monotonic() < deadline_s, f"not ready in time:\n{program.text()[-_LOG_TAIL_CHARS:]}"
        time.sleep(_POLL_S)
