"""A request's trace goes on from the router's, through queue, prefill and decode."""

from __future__ import annotations

import asyncio
import builtins
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pagedkv.integration.serve.tracing import RequestTracer, make_tracer
from pagedkv.plugin.config import TracingSection
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.observer import Outcome, RequestEnd
from pagedkv.plugin.requests import RequestId

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
UNSAMPLED = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-00"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider)


def _spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def _run(lab, tracer: RequestTracer, work) -> None:
    async def run() -> None:
        async with lab.serve(lab.make_backend(64), extra_observers=(tracer,)) as served:
            await work(served)

    asyncio.run(run())
    tracer.close()


def test_spans_follow_each_other_under_the_router_s(lab, tracer, exporter) -> None:
    async def work(served) -> None:
        metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
        await served.finish(await served.prefill(1, lab.ask(7, "a prompt of 20 chars", 4), metadata=metadata))

    _run(lab, tracer, work)
    spans = _spans(exporter)
    assert set(spans) == {"pagedkv.request", "queue", "prefill", "decode"}
    request = spans["pagedkv.request"]
    assert (request.parent.trace_id, request.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert request.context.trace_state.get("vendor") == "1"
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == request.context.span_id
        assert spans[name].context.trace_id == TRACE_ID
    assert request.start_time == spans["queue"].start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == request.end_time
    assert all(span.start_time <= span.end_time for span in spans.values())
    assert request.attributes["pagedkv.request_id"] == "7"
    assert request.attributes["pagedkv.outcome"] == "length"
    assert (request.attributes["gen_ai.usage.input_tokens"], request.attributes["gen_ai.usage.output_tokens"]) == (
        20,
        4,
    )
    assert not any("prompt of 20" in str(value) for span in spans.values() for value in span.attributes.values())


def test_what_the_router_does_not_sample_is_not_exported(lab, tracer, exporter) -> None:
    async def work(served) -> None:
        await served.prefill(1, lab.ask(1, "a", 1), metadata=(("traceparent", UNSAMPLED),))

    _run(lab, tracer, work)
    assert exporter.get_finished_spans() == ()


def test_without_a_router_s_trace_or_with_a_broken_one_a_new_one_begins(lab, tracer, exporter) -> None:
    async def work(served) -> None:
        await served.prefill(1, lab.ask(1, "a", 1))
        await served.prefill(2, lab.ask(2, "a", 1), metadata=(("traceparent", "nonsense"),))

    _run(lab, tracer, work)
    roots = [span for span in exporter.get_finished_spans() if span.name == "pagedkv.request"]
    assert [root.parent for root in roots] == [None, None]
    assert roots[0].context.trace_id != roots[1].context.trace_id


def test_a_failed_request_s_span_is_an_error(lab, tracer, exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served) -> None:
        monkeypatch.setattr(served.backend._model, "forward", lambda *_: 1 / 0)
        with pytest.raises(grpc.RpcError):
            await served.prefill(1, lab.ask(1, "a", 1))

    _run(lab, tracer, work)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["pagedkv.outcome"] == "failed"


def test_asked_for_but_not_installed_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_otel(name: str, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_otel)
    with pytest.raises(ConfigError, match=r"pagedkv\[otel\]"):
        make_tracer(TracingSection(otlp_endpoint="http://127.0.0.1:4317"))
    assert make_tracer(TracingSection()) is None


class Collector(TraceServiceServicer):
    """Of OTLP over gRPC."""

    def __init__(self) -> None:
        self.received: list[tuple[str, list[str]]] = []

    def Export(self, request, context) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            spans = [span.name for scope in resource.scope_spans for span in scope.spans]
            self.received.append((names["service.name"], spans))
        return ExportTraceServiceResponse()


def test_spans_reach_a_collector_before_the_server_s_end() -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tracer = make_tracer(TracingSection(otlp_endpoint=f"http://127.0.0.1:{port}", service_name="mine"))
    assert tracer is not None
    tracer.on_end(RequestEnd(RequestId(1), Outcome.LENGTH, 8, 0, 2, 1.0, 1.1, 1.2, 1.3))
    tracer.close()
    server.stop(None).wait()
    assert collector.received == [("mine", ["queue", "prefill", "decode", "pagedkv.request"])]
