"""Opens the observers of a server process that its config asks for: metrics endpoint and tracer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedkv.integration.serve.metrics.endpoint import MetricsEndpoint
from pagedkv.integration.serve.metrics.gpu import make_gpu_reader
from pagedkv.integration.serve.metrics.server_metrics import ServerMetrics, ServiceState
from pagedkv.integration.serve.tracing import RequestTracer, make_tracer
from pagedkv.plugin.config import AUTO, Config
from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.observer import Observers


@dataclass(slots=True)
class ServerObservers:
    """The observers of a server process. None is one that is off. Use `open_observers` to make it."""

    config: Config
    shard: ShardInfo
    endpoint: MetricsEndpoint | None
    tracer: RequestTracer | None
    metrics: ServerMetrics | None = None
    """Set once the backend exists."""

    @property
    def metrics_url(self) -> str:
        """URL of the metrics; empty if they are off."""
        return self.endpoint.url if self.endpoint else ""

    def observe(self, backend: Backend) -> Observers:
        """Begins to serve the backend's metrics. Call it while no other thread calls the backend."""
        if self.endpoint:
            self.metrics = ServerMetrics(
                backend.info,
                backend.stats(),
                model=Path(self.config.model.path).name,
                rank=self.shard.rank,
                gpu=make_gpu_reader(backend.info.device),
            )
            self.endpoint.registry.register(self.metrics)
        steps = (self.metrics,) if self.metrics else ()
        return Observers(requests=(*steps, *((self.tracer,) if self.tracer else ())), steps=steps)

    def attach(self, service: ServiceState) -> None:
        """Reports the service's state in the metrics and at the endpoint from now on."""
        if self.metrics:
            self.metrics.attach(service)
        if self.endpoint:
            self.endpoint.find_health_fault = service.find_health_fault


@contextmanager
def open_observers(config: Config, shard: ShardInfo) -> Iterator[ServerObservers]:
    """Opens the observers that the config asks for. Call it before the model is loaded, which takes long.

    Every shard runs every request. Each shard has its own metrics; only the first one records traces.

    Raises:
        ConfigError: the metrics' address can't be bound, or OpenTelemetry is configured but not installed.
    """
    with ExitStack() as stack:
        endpoint = None
        if config.metrics.listen not in ("", AUTO):
            endpoint = stack.enter_context(MetricsEndpoint(config.metrics.listen, shard.rank))
        tracer = make_tracer(config.tracing) if shard.rank == 0 else None
        if tracer:
            stack.callback(tracer.close)
        yield ServerObservers(config, shard, endpoint, tracer)
