"""Runs workers and the SMG gateway on this machine: OpenAI's API over one model, or several replicas of it."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pagedkv.integration.serve.child_process import command_path
from pagedkv.integration.serve.model_name import default_model_name
from pagedkv.integration.serve.own_processes import find_free_ports, forwarded_signals
from pagedkv.integration.serve.process_keeper import MAX_FAILURES, ProcessKeeper, ProcessSpec
from pagedkv.integration.serve.replica_resources import choose_gpu, share_memory, share_threads
from pagedkv.integration.serve.smg_gateway import LOOPBACK, SmgGateway
from pagedkv.plugin.config import Config
from pagedkv.plugin.cores import read_cpu_share, split_cores
from pagedkv.plugin.errors import ConfigError, UnavailableError

_GATEWAY_NAME = "gateway"
_POLL_S = 0.2
_GATEWAY_READY_TIMEOUT_S = 120.0
_GATEWAY_END_MARGIN_S = 10.0
"""Beyond the time in which running answers finish."""
_WORKERS_END_S = 15.0
"""They have nothing to finish once the gateway has ended, but the step that runs."""
OWN_SETTINGS = {
    "server.listen": f"{LOOPBACK}:0",
    "server.uds_path": "",
    "server.protocols": "smg",
}
"""What a deployment sets itself; the port is another one for each worker."""
OWN_KEYS = (*OWN_SETTINGS, "metrics.listen")


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What to run.

    Args:
        config: as every worker loads it: from the same file, environment and settings, with OWN_SETTINGS.
        config_file, settings: these, for the workers' command line.
    """

    config: Config
    config_file: Path | None
    settings: Sequence[str]
    num_replicas: int
    gateway: SmgGateway


@dataclass(frozen=True, slots=True)
class DeploymentSummary:
    """What can be called where, once all of it is ready."""

    url: str
    """Base of OpenAI's API, with /v1."""
    needs_key: bool
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
        key = " -H 'authorization: Bearer KEY'" if self.needs_key else ""
        workers = "1 worker" if self.num_replicas == 1 else f"{self.num_replicas} workers"
        return (
            f"ready: {self.url} ({workers} of {self.model}; metrics {', '.join(self.metrics_urls)})\n"
            f"try: curl {self.url}/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
        )


def run_deployment(options: DeploymentOptions, announce: Callable[[DeploymentSummary], None]) -> int:
    """Runs workers and gateway until SIGTERM or SIGINT. A second signal ends all at once.

    What ends is started again. Where there is no hope for the gateway, or for any worker, all ends.

    Args:
        announce: called once, when all are ready.

    Returns:
        0 if all ended by themselves when asked to; 1 if one had to be killed.

    Raises:
        ConfigError: the gateway can't run so, or the config is not for workers behind it.
        UnavailableError: a process does not start, or what is needed ends again and again; the others have ended.
    """
    if options.config.server.tls_cert:
        raise ConfigError(
            "server.tls_cert: workers of pagedkv up listen on loopback alone, without TLS; leave it out, and give the "
            "gateway its certificate: pagedkv up MODEL -- --tls-cert-path FILE --tls-key-path FILE"
        )
    options.gateway.check()
    return _Deployment(options).run(announce)


class _Deployment:
    def __init__(self, options: DeploymentOptions) -> None:
        self._options = options
        ports = find_free_ports(2 * options.num_replicas + 1)
        self._gateway_metrics_port = ports[0]
        self._worker_ports = ports[1::2]
        self._worker_metrics_ports = ports[2::2]
        self._keeper = ProcessKeeper()
        self._num_signals = 0

    def run(self, announce: Callable[[DeploymentSummary], None]) -> int:
        with forwarded_signals(self._on_signal):
            try:
                if not self._start():
                    return self._end()
                announce(self._summarize())
                try:
                    self._keep()
                finally:
                    code = self._end()
                return code
            finally:
                self._keeper.kill()

    def _on_signal(self) -> None:
        self._num_signals += 1

    def _is_stop_asked(self) -> bool:
        return self._num_signals > 0

    def _start(self) -> bool:
        """Returns whether all are ready; False if a signal came before."""
        for spec in self._worker_specs():
            self._keeper.start(spec)
        if not self._keeper.wait_until_ready(lambda: True, is_stopped=self._is_stop_asked):
            return False
        self._keeper.start(self._gateway_spec())
        deadline_s = time.monotonic() + _GATEWAY_READY_TIMEOUT_S

        def is_ready() -> bool:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"the gateway was not ready within {_GATEWAY_READY_TIMEOUT_S:g} s")
            return self._options.gateway.count_ready_workers() == self._options.num_replicas

        return self._keeper.wait_until_ready(is_ready, is_stopped=self._is_stop_asked)

    def _keep(self) -> None:
        workers = set(self._worker_names())
        while not self._is_stop_asked():
            self._keeper.look()
            hopeless = set(self._keeper.find_hopeless())
            if _GATEWAY_NAME in hopeless or workers <= hopeless:
                raise UnavailableError(
                    f"{', '.join(sorted(hopeless))}: ended {MAX_FAILURES} times in a row; the lines in the log say why"
                )
            time.sleep(_POLL_S)

    def _end(self) -> int:
        """The gateway first: it lets running answers finish, for which the workers must be there."""
        drain_s = self._options.config.server.drain_timeout_s
        killed = self._end_patiently([_GATEWAY_NAME], drain_s + _GATEWAY_END_MARGIN_S)
        killed += self._end_patiently(self._worker_names(), _WORKERS_END_S)
        return 1 if killed else 0

    def _end_patiently(self, names: Sequence[str], timeout_s: float) -> list[str]:
        return self._keeper.end(names, timeout_s, is_hurried=lambda: self._num_signals > 1)

    def _worker_names(self) -> list[str]:
        num_replicas = self._options.num_replicas
        return [f"worker {index}" for index in range(num_replicas)] if num_replicas > 1 else ["worker"]

    def _worker_specs(self) -> list[ProcessSpec]:
        options = self._options
        several = options.num_replicas > 1
        cores = split_cores(read_cpu_share().cores if several else (), options.num_replicas)
        return [
            ProcessSpec(
                name=name,
                command=self._worker_command(self._worker_ports[index], self._worker_metrics_ports[index]),
                environ=choose_gpu(options.config, index, os.environ) if several else os.environ,
                tells_ready=True,
                cores=cores[index],
            )
            for index, name in enumerate(self._worker_names())
        ]

    def _worker_command(self, port: int, metrics_port: int) -> list[str]:
        options = self._options
        command = [command_path(), "serve", options.config.model.path, "--protocol", "smg", "--uds-path", ""]
        command += ["--listen", f"{LOOPBACK}:{port}", "--metrics-listen", f"{LOOPBACK}:{metrics_port}"]
        if options.config_file is not None:
            command += ["--config", str(options.config_file)]
        config, num_replicas = options.config, options.num_replicas
        shares = share_memory(config, num_replicas) | share_threads(config, num_replicas)
        for setting in (*options.settings, *(f"{key}={value}" for key, value in shares.items())):
            command += ["--set", setting]
        return command

    def _gateway_spec(self) -> ProcessSpec:
        gateway, drain_s = self._options.gateway, self._options.config.server.drain_timeout_s
        command = gateway.make_command(self._worker_urls(), self._gateway_metrics_port, drain_s)
        return ProcessSpec(_GATEWAY_NAME, command, gateway.make_environment(), tells_ready=False)

    def _worker_urls(self) -> list[str]:
        return [f"grpc://{LOOPBACK}:{port}" for port in self._worker_ports]

    def _summarize(self) -> DeploymentSummary:
        options = self._options
        metrics_ports = [self._gateway_metrics_port, *self._worker_metrics_ports]
        return DeploymentSummary(
            url=f"{options.gateway.url}/v1",
            needs_key=options.gateway.needs_key,
            model=options.config.server.served_model_name or default_model_name(options.config.model.path),
            num_replicas=options.num_replicas,
            worker_urls=tuple(self._worker_urls()),
            metrics_urls=tuple(f"http://{LOOPBACK}:{port}/metrics" for port in metrics_ports),
        )
