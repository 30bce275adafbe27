"""Traces of requests by OpenTelemetry. A request's span continues the trace of its client."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from pagedkv.plugin.config import TracingSection
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.observer import Outcome, Refusal, RequestEnd

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_MAX_QUEUED = 10_000
_CLOSE_TIMEOUT_S = 5.0


class RequestTracer:
    """A `RequestObserver` that records a trace for each request.

    Creates the spans when a request has ended, on a separate thread, with the times at which things happened.
    `pagedkv.request` has up to three children: `queue` until the first step, `prefill` until the first token, `decode`
    until the end. A request that got no token has none.

    Args:
        provider: creates the spans; shut down by `close`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pagedkv")
        self._propagator = TraceContextTextMapPropagator()
        self._ended: queue.Queue[tuple[RequestEnd, int] | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="pagedkv-tracing", daemon=True)
        self._thread.start()

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        """Does nothing: the spans are created at the end of the request and include this time."""

    def on_end(self, end: RequestEnd) -> None:
        try:
            self._ended.put_nowait((end, time.time_ns() - time.monotonic_ns()))
        except queue.Full:
            logger.warning("traces are lost: %d wait to be made", _MAX_QUEUED)

    def on_refusal(self, reason: Refusal, num_requests: int) -> None:
        """Does nothing: the router's own span has the error."""

    def close(self) -> None:
        """Exports the remaining spans, with a short timeout."""
        self._ended.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._provider.shutdown()

    def _run(self) -> None:
        while (item := self._ended.get()) is not None:
            self._make_trace(*item)

    def _make_trace(self, end: RequestEnd, epoch_ns: int) -> None:
        try:
            self._make_spans(end, epoch_ns)
        except Exception:
            logger.exception("a trace is lost")

    def _make_spans(self, end: RequestEnd, epoch_ns: int) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        def at(seconds: float) -> int:
            return epoch_ns + int(seconds * 1e9)

        span = self._tracer.start_span(
            "pagedkv.request",
            self._propagator.extract(end.trace_context),
            SpanKind.SERVER,
            attributes={
                "pagedkv.request_id": str(end.request_id),
                "pagedkv.outcome": end.outcome.value,
                "pagedkv.cached_tokens": end.num_cached_tokens,
                "gen_ai.usage.input_tokens": end.num_prompt_tokens,
                "gen_ai.usage.output_tokens": end.num_generated_tokens,
            },
            start_time=at(end.arrived_s),
        )
        if end.outcome is Outcome.FAILED:
            span.set_status(StatusCode.ERROR)
        if end.first_token_s is not None:
            admitted_s = end.arrived_s if end.admitted_s is None else end.admitted_s
            parent = set_span_in_context(span)
            self._make_span("queue", parent, at(end.arrived_s), at(admitted_s))
            self._make_span("prefill", parent, at(admitted_s), at(end.first_token_s))
            self._make_span("decode", parent, at(end.first_token_s), at(end.ended_s))
        span.end(at(end.ended_s))

    def _make_span(self, name: str, parent: Context, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_ns)


def make_tracer(section: TracingSection) -> RequestTracer | None:
    """Makes a tracer that exports by OTLP over gRPC; None if no endpoint is set.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not section.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces are to go to {section.otlp_endpoint}, but OpenTelemetry is not installed ({error}); install "
            "pagedkv[otel], or leave tracing.otlp_endpoint (--otlp-endpoint) out"
        ) from error
    exporter = OTLPSpanExporter(section.otlp_endpoint, insecure=not section.otlp_endpoint.startswith("https://"))
    provider = TracerProvider(resource=Resource.create({"service.name": section.service_name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    logger.info("traces go to %s", section.otlp_endpoint)
    return RequestTracer(provider)
