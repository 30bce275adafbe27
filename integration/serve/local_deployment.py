"""Runs workers and the SMG gateway on this machine: OpenAI's API over one model, or several replicas of it."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pagedkv.integration.serve.child_process import command_path
from pagedkv.integration.serve.own_processes import find_free_ports, forwarded_signals
from pagedkv.integration.serve.process_keeper import ProcessKeeper, ProcessSpec
from pagedkv.integration.serve.smg_facts import default_model_name
from pagedkv.plugin.config import AUTO, Config
from pagedkv.plugin.cores import read_cpu_share, split_cores
from pagedkv.plugin.errors import ConfigError, UnavailableError
from pagedkv.plugin.threads import choose_threads, read_named_threads

GATEWAY = "gateway"
LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_POLL_S = 0.2
_GATEWAY_READY_TIMEOUT_S = 120.0
_END_MARGIN_S = 10.0
"""Beyond the time in which running answers finish."""
OWN_KEYS = ("server.listen", "server.uds_path", "server.protocols", "metrics.listen")
"""Keys that a deployment sets itself."""


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What to run.

    Args:
        config: as every worker loads it, from the same file, environment and settings.
        config_file, settings: these, for the workers' command line.
        gateway_program: path of `smg`.
        gateway_arguments: appended to `smg launch`.
    """

    config: Config
    config_file: Path | None
    settings: Sequence[str]
    num_replicas: int
    host: str
    port: int
    policy: str
    gateway_program: str
    gateway_arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DeploymentSummary:
    """What can be called where, once all of it is ready."""

    url: str
    """Base of OpenAI's API, with /v1."""
    model: str
    num_replicas: int
    worker_urls: tuple[str, ...]
    metrics_urls: tuple[str, ...]
    """Of the gateway, then of each worker."""
    event: str = field(default="ready", init=False)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_text(self) -> str:
        body = json.dumps({"model": self.model, "messages": [{"role": "user", "content": "Hello"}]})
        workers = "1 worker" if self.num_replicas == 1 else f"{self.num_replicas} workers"
        return (
            f"ready: {self.url} ({workers} of {self.model}; metrics {', '.join(self.metrics_urls)})\n"
            f"try: curl {self.url}/chat/completions -H 'content-type: application/json' -d '{body}'"
        )


def find_gateway_program(named: str | None) -> str:
    """The path of `smg`: as named, else beside this Python, else on the PATH. Raises ConfigError."""
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"--gateway: {named} is no program")
        return found
    beside = Path(sysconfig.get_path("scripts"), "smg")
    program = str(beside) if beside.exists() else shutil.which("smg")
    if program is None:
        raise ConfigError(
            "the SMG gateway is not installed: pip install 'pagedkv[gateway]', or install smg in an environment of its "
            "own and name its program with --gateway"
        )
    return program


def run_deployment(options: DeploymentOptions, announce: Callable[[DeploymentSummary], None]) -> int:
    """Runs workers and gateway until SIGTERM or SIGINT. A second signal ends all at once.

    Args:
        announce: called once, when all are ready.

    Returns:
        0 if all ended by themselves when asked to; 1 if one had to be killed.

    Raises:
        ConfigError: the port is in use.
        UnavailableError: a process does not start, or ends again and again; the others have ended.
    """
    return _Deployment(options).run(announce)


class _Deployment:
    def __init__(self, options: DeploymentOptions) -> None:
        self._options = options
        _refuse_port_in_use(options.host, options.port)
        ports = find_free_ports(2 * options.num_replicas + 1)
        self._gateway_metrics_port = ports[0]
        self._worker_ports = ports[1::2]
        self._worker_metrics_ports = ports[2::2]
        self._keeper = ProcessKeeper()
        self._num_signals = 0

    def run(self, announce: Callable[[DeploymentSummary], None]) -> int:
        with forwarded_signals(self._on_signal):
            try:
                if self._start():
                    announce(self._summarize())
                    while not self._is_stop_asked():
                        self._keeper.look()
                        time.sleep(_POLL_S)
                return self._end()
            finally:
                self._keeper.kill()

    def _on_signal(self) -> None:
        self._num_signals += 1

    def _is_stop_asked(self) -> bool:
        return self._num_signals > 0

    def _start(self) -> bool:
        """Returns whether all are ready; False if a signal came before."""
        workers = self._worker_specs()
        for spec in workers:
            self._keeper.start(spec)
        for spec in workers:
            if self._keeper.wait_until_ready(spec.name, is_stopped=self._is_stop_asked) is None:
                return False
        self._keeper.start(self._gateway_spec())
        deadline_s = time.monotonic() + _GATEWAY_READY_TIMEOUT_S
        while not self._is_gateway_ready():
            if self._is_stop_asked():
                return False
            if self._keeper.has_ended(GATEWAY):
                raise UnavailableError("the gateway ended before it was ready; its lines in the log say why")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"the gateway was not ready within {_GATEWAY_READY_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        return True

    def _end(self) -> int:
        """The gateway first: it lets running answers finish, for which the workers must be there."""
        drain_s = self._options.config.server.drain_timeout_s
        killed = self._end_patiently([GATEWAY], drain_s + _END_MARGIN_S)
        workers = [spec.name for spec in self._worker_specs()]
        killed += self._end_patiently(workers, drain_s + _END_MARGIN_S)
        return 1 if killed else 0

    def _end_patiently(self, names: Sequence[str], timeout_s: float) -> list[str]:
        return self._keeper.end(names, timeout_s, is_hurried=lambda: self._num_signals > 1)

    def _worker_specs(self) -> list[ProcessSpec]:
        options = self._options
        several = options.num_replicas > 1
        cores = split_cores(read_cpu_share().cores if several else (), options.num_replicas)
        return [
            ProcessSpec(
                name=f"worker {index}" if several else "worker",
                command=self._worker_command(port, metrics_port),
                environ=_choose_gpu(index, options.num_replicas, os.environ),
                tells_ready=True,
                cores=cores[index],
            )
            for index, (port, metrics_port) in enumerate(
                zip(self._worker_ports, self._worker_metrics_ports, strict=True)
            )
        ]

    def _worker_command(self, port: int, metrics_port: int) -> list[str]:
        options = self._options
        command = [command_path(), "serve", options.config.model.path, "--protocol", "smg"]
        command += ["--listen", f"{LOOPBACK}:{port}", "--metrics-listen", f"{LOOPBACK}:{metrics_port}"]
        if options.config_file is not None:
            command += ["--config", str(options.config_file)]
        config, num_replicas = options.config, options.num_replicas
        shares = share_memory(config, num_replicas) | share_threads(config, num_replicas)
        for setting in (*options.settings, *(f"{key}={value}" for key, value in shares.items())):
            command += ["--set", setting]
        return command

    def _gateway_spec(self) -> ProcessSpec:
        options = self._options
        command = [options.gateway_program, "launch", "--host", options.host, "--port", str(options.port)]
        command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(self._gateway_metrics_port)]
        command += ["--worker-urls", *self._worker_urls(), "--policy", options.policy]
        command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
        command += ["--shutdown-grace-period-secs", str(max(1, round(options.config.server.drain_timeout_s)))]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # It finds its workers on this machine, never through a proxy.
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK]))
        environ |= {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
        return ProcessSpec(GATEWAY, [*command, *options.gateway_arguments], environ, tells_ready=False)

    def _worker_urls(self) -> list[str]:
        return [f"grpc://{LOOPBACK}:{port}" for port in self._worker_ports]

    def _is_gateway_ready(self) -> bool:
        base = _url_of(self._options.host, self._options.port)
        if _get(f"{base}/readiness") is None:
            return False
        workers = json.loads(_get(f"{base}/workers") or b"{}").get("workers", [])
        return sum(worker.get("status", "ready") == "ready" for worker in workers) == self._options.num_replicas

    def _summarize(self) -> DeploymentSummary:
        options = self._options
        metrics_ports = [self._gateway_metrics_port, *self._worker_metrics_ports]
        return DeploymentSummary(
            url=f"{_url_of(options.host, options.port)}/v1",
            model=options.config.server.served_model_name or default_model_name(options.config.model.path),
            num_replicas=options.num_replicas,
            worker_urls=tuple(self._worker_urls()),
            metrics_urls=tuple(f"http://{LOOPBACK}:{port}/metrics" for port in metrics_ports),
        )


def share_threads(config: Config, num_replicas: int) -> dict[str, Any]:
    """Settings by which replicas share cores and CPU quota, of which one would take all; none where a number is set."""
    if num_replicas == 1 or config.model.threads != AUTO or read_named_threads() is not None:
        return {}
    return {"model.threads": choose_threads(AUTO, num_replicas).num_threads}


def share_memory(config: Config, num_replicas: int) -> dict[str, Any]:
    """Settings by which replicas share the memory of which one would take its fraction; none where a size is given."""
    if config.cache.memory != AUTO or config.cache.num_blocks != AUTO:
        return {}
    num_sharing = -(-num_replicas // max(1, _count_gpus(config)))
    return {"cache.memory_fraction": config.cache.memory_fraction / num_sharing} if num_sharing > 1 else {}


def _count_gpus(config: Config) -> int:
    if config.model.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _choose_gpu(index: int, num_replicas: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a replica: with several GPUs each sees one of them, in turn."""
    visible = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not visible:
        import torch

        visible = [str(number) for number in range(torch.cuda.device_count())]
    if num_replicas == 1 or len(visible) < 2:
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": visible[index % len(visible)]}


def _refuse_port_in_use(host: str, port: int) -> None:
    import socket

    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; choose others with --host, --port"
        ) from None


def _url_of(host: str, port: int) -> str:
    reachable = LOOPBACK if host in _EVERYWHERE else host
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _get(url: str) -> bytes | None:
    """The body of an answer with status 200; None for anything else. Never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return response.read() if response.status == HTTPStatus.OK else None
    except (OSError, urllib.error.URLError):
        return None
