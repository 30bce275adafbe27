"""Collects one server's metrics: counts events as they happen, reads the rest from the last step's snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagedkv.integration.serve.metrics import catalogue
from pagedkv.integration.serve.metrics.catalogue import BASE_LABELS, CATALOGUE, Metric, Snapshot, Values
from pagedkv.plugin.interface import BackendInfo
from pagedkv.plugin.observer import Outcome, Refusal, RequestEnd
from pagedkv.plugin.stats import BackendStats

PHASES = ("prefill", "decode", "mixed")
_ENDED_BY_ITSELF = (Outcome.LENGTH, Outcome.EOS_TOKEN, Outcome.STOP_SEQUENCE)


class ServiceState(Protocol):
    """What a scrape reads from the service, on the endpoint's thread. `GenerationService` implements it."""

    def step_running_s(self) -> float: ...

    def find_health_fault(self) -> str | None: ...


class GpuReader(Protocol):
    """Reads GPU values, by metric name and GPU."""

    def read(self) -> Mapping[str, Mapping[str, float]]: ...


@dataclass(frozen=True, slots=True)
class _Published:
    """The last step's values. The step's thread replaces the whole object, so that a reader never sees a mix of two."""

    stats: BackendStats
    last_step_timestamp_s: float


class ServerMetrics(Collector):
    """A `RequestObserver` and `StepObserver` whose metrics a registry of prometheus_client collects.

    Args:
        info: of the backend.
        stats: of the backend before its first request.
        model: name of the model.
        rank: of this shard.
        gpu: reads the GPU's metrics; None leaves them out.
    """

    def __init__(
        self, info: BackendInfo, stats: BackendStats, *, model: str, rank: int = 0, gpu: GpuReader | None = None
    ) -> None:
        self._base = (info.backend, str(rank))
        self._info = (
            version("pagedkv"),
            model,
            str(info.dtype).removeprefix("torch."),
            info.kv_dtype.name,
            info.attention_kernels,
        )
        self._published = _Published(stats, time.time())
        self._service: ServiceState | None = None
        self._gpu = gpu
        self._events: dict[str, Histogram | Counter] = {}
        self._ttft, self._tpot = self._histogram(catalogue.TTFT), self._histogram(catalogue.TPOT)
        self._queue_time = self._histogram(catalogue.QUEUE_TIME)
        self._duration = self._histogram(catalogue.REQUEST_DURATION)
        self._prompt_length = self._histogram(catalogue.PROMPT_LENGTH)
        self._output_length = self._histogram(catalogue.OUTPUT_LENGTH)
        self._steps = {phase: self._histogram(catalogue.STEP_DURATION, phase) for phase in PHASES}
        self._outcomes = {outcome: self._counter(catalogue.REQUESTS, outcome.value) for outcome in Outcome}
        self._refusals = {reason: self._counter(catalogue.REFUSED, reason.value) for reason in Refusal}

    def attach(self, service: ServiceState) -> None:
        self._service = service

    def on_step(self, duration_s: float, stats: BackendStats) -> None:
        before, after_s = self._published.stats, self._published.last_step_timestamp_s
        phase = _find_phase(before, stats)
        if phase is not None:
            self._steps[phase].observe(duration_s)
            after_s = time.time()
        self._published = _Published(stats, after_s)

    def on_change(self, stats: BackendStats) -> None:
        self._published = _Published(stats, self._published.last_step_timestamp_s)

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        if queue_s is not None:
            self._queue_time.observe(queue_s)

    def on_end(self, end: RequestEnd) -> None:
        self._outcomes[end.outcome].inc()
        self._duration.observe(end.total_s)
        self._prompt_length.observe(end.num_prompt_tokens)
        self._output_length.observe(end.num_generated_tokens)
        if end.tpot_s is not None and end.outcome in _ENDED_BY_ITSELF:
            self._tpot.observe(end.tpot_s)

    def on_refusal(self, reason: Refusal, num_requests: int) -> None:
        self._refusals[reason].inc(num_requests)

    def collect(self) -> Iterator[Family]:
        """Yields every metric of the catalogue, in its order."""
        snapshot = self._snapshot()
        gpu = self._gpu.read() if self._gpu else {}
        for metric in CATALOGUE:
            if metric.name in self._events:
                yield from _without_creation_times(self._events[metric.name].collect())
            elif metric is catalogue.INFO:
                yield self._family(metric, {self._info: 1.0}, catalogue.INFO_LABELS)
            elif metric in catalogue.GPU_METRICS:
                if metric.name in gpu:
                    yield self._family(metric, {(name,): value for name, value in gpu[metric.name].items()}, ("gpu",))
            else:
                assert metric.read is not None, "whatever is no event is read"
                yield self._read(metric, metric.read(snapshot))

    def _snapshot(self) -> Snapshot:
        published, service = self._published, self._service
        return Snapshot(
            published.stats,
            published.last_step_timestamp_s,
            service.step_running_s() if service else 0.0,
            service is not None and service.find_health_fault() is None,
        )

    def _read(self, metric: Metric, values: Values) -> Family:
        if isinstance(values, Mapping):
            assert metric.label is not None
            return self._family(metric, {(name,): value for name, value in values.items()}, (metric.label,))
        return self._family(metric, {(): values})

    def _family(
        self, metric: Metric, samples: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()
    ) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=(*BASE_LABELS, *labels))
        for own, value in samples.items():
            family.add_metric((*self._base, *own), value)
        return family

    def _histogram(self, metric: Metric, value: str | None = None) -> Histogram:
        if metric.name not in self._events:
            self._events[metric.name] = Histogram(
                metric.name, metric.meaning, _labels(metric), registry=None, buckets=metric.buckets
            )
        histogram = self._events[metric.name]
        assert isinstance(histogram, Histogram)
        return histogram.labels(*self._base, *([] if value is None else [value]))

    def _counter(self, metric: Metric, value: str) -> Counter:
        if metric.name not in self._events:
            self._events[metric.name] = Counter(metric.name, metric.meaning, _labels(metric), registry=None)
        counter = self._events[metric.name]
        assert isinstance(counter, Counter)
        return counter.labels(*self._base, value)


def _labels(metric: Metric) -> tuple[str, ...]:
    return BASE_LABELS if metric.label is None else (*BASE_LABELS, metric.label)


def _find_phase(before: BackendStats, after: BackendStats) -> str | None:
    """The phase of the step between two stats; None if no token was computed, as when all requests wait for blocks."""
    has_prefill = after.computed_prefill_tokens > before.computed_prefill_tokens
    has_decode = after.computed_decode_tokens > before.computed_decode_tokens
    if has_prefill and has_decode:
        return "mixed"
    return "prefill" if has_prefill else "decode" if has_decode else None


def _without_creation_times(families: Iterable[Family]) -> Iterator[Family]:
    """Removes the series "_created" that prometheus_client adds to each counter and histogram."""
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family
