"""With a load running, every metric of the table in METRICS.md moves as its meaning says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.integration.serve.metrics import catalogue
from pagedkv.integration.serve.metrics import endpoint as endpoint_module
from pagedkv.integration.serve.metrics.catalogue import CATALOGUE, GPU_METRICS
from pagedkv.integration.serve.metrics.endpoint import MetricsEndpoint
from pagedkv.integration.serve.metrics.gpu import NvmlReader
from pagedkv.integration.serve.metrics.server_metrics import ServerMetrics
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.requests import Request, RequestId, SamplingParams

NUM_BLOCKS = 24
BLOCK_SIZE = 8
RATIOS = ("pagedkv_cache_utilization_ratio", "pagedkv_cache_fragmentation_ratio")


def test_endpoint_serves_what_the_table_names_and_nothing_else(lab) -> None:
    async def run() -> None:
        async with lab.serve(lab.make_backend(NUM_BLOCKS)) as served:
            found = served.scrape()
            named = {
                metric.name.removesuffix("_total"): metric.kind for metric in CATALOGUE if metric not in GPU_METRICS
            }
            assert found.kinds == named
            labels = [dict(has) for _, has in found.samples]
            assert {(has["backend"], has["rank"]) for has in labels} == {("paged", "0")}
            assert not any(name.endswith("_created") for name, _ in found.samples)

    asyncio.run(run())


class Watch:
    """What one metric did over a piece of work."""

    def __init__(self, served: Any) -> None:
        self._served = served
        self.before = self.after = served.scrape()

    def step(self) -> None:
        """Looks between two steps: ratios must be ratios, and blocks add up."""
        found = self._served.scrape()
        assert all(0 <= found.value(name) <= 1 for name in RATIOS)
        assert found.value("pagedkv_cache_blocks") == found.value("pagedkv_cache_total_blocks") == NUM_BLOCKS
        self.after = found

    def grown(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)

    def restart(self) -> None:
        self.step()
        self.before = self.after


async def _check_prefix_hits(lab, served, watch: Watch) -> None:
    prompt = "a prompt of forty letters, which is 5 blo"[: 5 * BLOCK_SIZE]
    await served.finish(await served.prefill(1, lab.ask(1, prompt, 4)), watch.step)
    watch.step()
    assert watch.grown("pagedkv_prompt_tokens_total") == watch.grown("pagedkv_prefix_query_tokens_total") == 40
    assert watch.grown("pagedkv_prefix_hit_tokens_total") == 0
    assert watch.grown("pagedkv_computed_tokens_total", phase="prefill") == 40
    assert watch.grown("pagedkv_computed_tokens_total", phase="decode") == 3
    assert watch.grown("pagedkv_generated_tokens_total") == 4
    assert watch.after.value("pagedkv_cache_blocks", state="used") == 0
    assert watch.after.value("pagedkv_cache_blocks", state="cached") == 5
    watch.restart()
    await served.finish(await served.prefill(1, lab.ask(1, prompt, 4)), watch.step)
    watch.step()
    hit = 4 * BLOCK_SIZE  # The last token is always computed, so the fifth block is no hit.
    assert watch.grown("pagedkv_prefix_hit_tokens_total") == watch.grown("pagedkv_saved_prefill_tokens_total") == hit
    assert watch.grown("pagedkv_computed_tokens_total", phase="prefill") == 40 - hit
    for name in ("request_prompt_tokens", "request_generated_tokens", "time_to_first_token_seconds"):
        assert watch.grown(f"pagedkv_{name}_count") == 1
    for name in ("time_per_output_token_seconds", "queue_time_seconds", "request_duration_seconds"):
        assert watch.grown(f"pagedkv_{name}_count") == 1
        assert watch.grown(f"pagedkv_{name}_sum") > 0
    assert watch.grown("pagedkv_request_prompt_tokens_sum") == 40
    assert watch.grown("pagedkv_request_generated_tokens_sum") == 4
    assert watch.grown("pagedkv_requests_total", outcome="length") == 1
    assert watch.grown("pagedkv_step_duration_seconds_count", phase="prefill") == 1
    assert watch.grown("pagedkv_step_duration_seconds_count", phase="decode") == 3


async def _check_evictions(lab, served, watch: Watch) -> None:
    for number in range(6):
        await served.finish(await served.prefill(number, lab.ask(number, chr(97 + number) * 40, 2)), watch.step)
    watch.step()
    assert watch.grown("pagedkv_evictions_total") > 0
    assert watch.grown("pagedkv_preemptions_total") == 0


async def _check_preemptions(lab, served, watch: Watch) -> None:
    requests = [lab.ask(number, chr(65 + number) * 40, 60) for number in range(4)]
    await served.finish(await served.prefill(1, *requests), watch.step)
    watch.step()
    assert watch.grown("pagedkv_preemptions_total") > 0
    assert watch.grown("pagedkv_recomputed_tokens_total") > 0
    assert watch.grown("pagedkv_prefix_query_tokens_total") == 160, "a readmission is no query"
    assert watch.grown("pagedkv_prefix_hit_tokens_total") == 0, "what is found again after a preemption is no hit"
    assert watch.grown("pagedkv_requests_total", outcome="length") == 4


async def _check_gauges_and_mixed_steps(lab, served, watch: Watch) -> None:
    running = await served.prefill(1, lab.ask(1, "x" * 20, 50))
    both = await served.prefill(2, lab.ask(2, "y" * 20, 50), running=running.batch)
    watch.step()
    assert watch.grown("pagedkv_step_duration_seconds_count", phase="mixed") == 1
    assert watch.after.value("pagedkv_requests_running") == 2
    used = watch.after.value("pagedkv_cache_blocks", state="used")
    assert used == 6
    assert watch.after.value("pagedkv_cache_utilization_ratio") == used / NUM_BLOCKS
    per_block = watch.after.value("pagedkv_kv_total_bytes") / NUM_BLOCKS
    assert watch.after.value("pagedkv_kv_reserved_bytes") == used * per_block
    # 20 and 1 tokens of the one, 20 of the other: what a step samples has no slot yet.
    assert watch.after.value("pagedkv_kv_used_bytes") == 41 * per_block / BLOCK_SIZE
    assert watch.after.value("pagedkv_cache_fragmentation_ratio") == pytest.approx(1 - 41 / (used * BLOCK_SIZE))
    await served.prefill(3, *[lab.ask(number, chr(number) * 60, 50) for number in range(70, 75)])
    watch.step()
    assert watch.after.value("pagedkv_requests_waiting") > 0
    last_s = watch.after.value("pagedkv_last_step_timestamp_seconds")
    assert abs(last_s - time.time()) < 60
    await served.decode(both.batch.id)
    watch.step()
    assert watch.after.value("pagedkv_last_step_timestamp_seconds") > last_s
    watch.restart()
    await served.clear()
    watch.step()
    assert watch.grown("pagedkv_requests_total", outcome="aborted") == 7


async def _check_copies(lab, served, watch: Watch) -> None:
    """A fork is nothing that a router can ask for, so the backend is asked, between two of the router's calls."""
    running = await served.prefill(1, lab.ask(1, "fork me" * 3, 50))
    child = Request(
        RequestId(2), served.backend._sequences[RequestId(1)].token_ids[:21], SamplingParams(), parent_id=RequestId(1)
    )
    served.backend.add([child])
    served.backend.step(only=[child.id])
    served.backend.abort([child.id])
    await served.decode(running.batch.id)
    watch.step()
    assert watch.grown("pagedkv_copies_total") == 1
    assert watch.grown("pagedkv_saved_prefill_tokens_total") == 20
    await served.clear()


async def _check_refusals(lab, served, watch: Watch) -> None:
    async def refused(*requests: Any, running: Any = None) -> None:
        with pytest.raises(grpc.RpcError):
            await served.prefill(9, *requests, running=running)

    grammar = pb.NextTokenChooserParameters(
        temperature=1.0, top_p=1.0, typical_p=1.0, grammar="[0-9]+", grammar_type=pb.GRAMMAR_TYPE_REGEX
    )
    with_grammar = lab.ask(3, "x", 4)
    with_grammar.parameters.CopyFrom(grammar)
    served_beside = await served.prefill(
        9, lab.ask(1, "", 4), lab.ask(2, "x", 1), with_grammar, lab.ask(4, "x" * 400, 4)
    )
    assert not served_beside.HasField("batch")
    await refused(lab.ask(1, "x", 4), running=pb.CachedBatch(id=77))
    await served.prefill(1, lab.ask(1, "x", 20))
    await refused(lab.ask(1, "x", 4))
    served.server.service.begin_drain()
    await refused(lab.ask(5, "x", 4))
    watch.step()
    told = ("invalid", "unsupported", "too_long", "unknown_batch", "duplicate", "draining")
    reasons = {**dict.fromkeys(told, 1), "not_ready": 0, "failed": 0}
    assert {reason: watch.grown("pagedkv_refused_requests_total", reason=reason) for reason in reasons} == reasons
    assert watch.after.value("pagedkv_healthy") == 0
    await served.clear()


def test_every_metric_moves_under_load_as_its_meaning_says(lab) -> None:
    async def run() -> None:
        async with lab.serve(lab.make_backend(NUM_BLOCKS)) as served:
            watch = Watch(served)
            assert watch.before.value("pagedkv_healthy") == 1
            assert watch.before.value("pagedkv_cache_block_size_tokens") == BLOCK_SIZE
            start = watch.before
            for check in (
                _check_prefix_hits,
                _check_evictions,
                _check_preemptions,
                _check_gauges_and_mixed_steps,
                _check_copies,
                _check_refusals,
            ):
                watch.restart()
                await check(lab, served, watch)
            watch.step()
            assert watch.after.value("pagedkv_cache_blocks", state="used") == 0
            assert watch.after.value("pagedkv_requests_running") == watch.after.value("pagedkv_requests_waiting") == 0
            counters = [metric for metric in CATALOGUE if metric.kind == "counter"]
            assert [one.name for one in counters if watch.after.value(one.name) <= start.value(one.name)] == []

    asyncio.run(run())


def test_failed_and_abandoned_requests_count_as_such(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        backend = lab.make_backend(NUM_BLOCKS)
        async with lab.serve(backend, abandoned_batch_timeout_s=0.3) as served:
            await served.prefill(1, lab.ask(1, "alone", 50))
            deadline_s = time.monotonic() + 10
            while not served.scrape().value("pagedkv_requests_total", outcome="abandoned"):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            monkeypatch.setattr(backend._model, "forward", lambda *_: 1 / 0)
            with pytest.raises(grpc.RpcError):
                await served.prefill(2, lab.ask(2, "boom", 5), lab.ask(3, "boom", 5))
            found = served.scrape()
            assert found.value("pagedkv_requests_total", outcome="failed") == 2
            assert found.value("pagedkv_cache_blocks", state="used") == 0

    asyncio.run(run())


def test_a_stuck_step_shows_while_it_is_stuck(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        backend = lab.make_backend(NUM_BLOCKS)
        async with lab.serve(backend) as served:
            entered, go_on, forward = threading.Event(), threading.Event(), backend._model.forward
            monkeypatch.setattr(
                backend._model, "forward", lambda *args: (entered.set(), go_on.wait(30), forward(*args))[-1]
            )
            stuck = asyncio.create_task(served.prefill(1, lab.ask(1, "stuck", 1)))
            assert await asyncio.to_thread(entered.wait, 10)
            first = await asyncio.to_thread(served.scrape)
            second = await asyncio.to_thread(served.scrape)
            assert 0 < first.value("pagedkv_step_running_seconds") < second.value("pagedkv_step_running_seconds")
            assert second.value("pagedkv_requests_waiting") == 1
            go_on.set()
            await stuck
            assert served.scrape().value("pagedkv_step_running_seconds") == 0

    asyncio.run(run())


def _connect(endpoint: MetricsEndpoint) -> socket.socket:
    host, port = endpoint.url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=5)


class TestEndpoint:
    def test_everything_but_metrics_is_not_found(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint:
            assert urllib.request.urlopen(endpoint.url, timeout=5).read() == b""
            for path in ("", "favicon.ico", "metrics/x", "../etc/passwd"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(endpoint.url.replace("metrics", path), timeout=5)
            with pytest.raises(urllib.error.HTTPError, match="405"):
                urllib.request.urlopen(endpoint.url, data=b"x", timeout=5)

    def test_healthz_tells_what_health_tells(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint:
            url = endpoint.url.replace("metrics", "healthz")
            for fault in ("the server is starting", "a step is stuck"):
                with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                    urllib.request.urlopen(url, timeout=5)
                assert refused.value.read().decode() == f"{fault}\n"
                endpoint.find_health_fault = lambda: "a step is stuck"
            endpoint.find_health_fault = lambda: None
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert (answer.status, answer.read()) == (200, b"ok\n")

    def test_a_client_that_sends_nothing_is_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(endpoint_module._Handler, "timeout", 0.2)
        with MetricsEndpoint("127.0.0.1:0") as endpoint, _connect(endpoint) as silent:
            assert silent.recv(1) == b""

    def test_clients_that_stay_can_not_pile_up(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint, contextlib.ExitStack() as stack:
            for _ in range(endpoint_module._MAX_CLIENTS):
                stack.enter_context(_connect(endpoint))
            late = stack.enter_context(_connect(endpoint))
            assert late.recv(1) == b"", "one too many is closed at once"
            stack.close()
            deadline_s = time.monotonic() + 20
            while endpoint._server._free_clients._value < endpoint_module._MAX_CLIENTS:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert urllib.request.urlopen(endpoint.url, timeout=5).read() == b""

    def test_a_port_that_is_taken_is_a_clear_error(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint:
            address = endpoint.url.removeprefix("http://").removesuffix("/metrics")
            with pytest.raises(ConfigError, match=rf"{address}.*in use.*metrics\.listen"):
                MetricsEndpoint(address)

    def test_a_shard_takes_the_port_after_those_of_lower_rank(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint:
            port = int(endpoint.url.split(":")[2].split("/")[0])
            with pytest.raises(ConfigError, match=f":{port}: .*in use"):
                MetricsEndpoint(f"127.0.0.1:{port - 2}", rank=2)
        with pytest.raises(ConfigError, match="no port"):
            MetricsEndpoint("127.0.0.1:65535", rank=1)

    def test_it_speaks_openmetrics_to_those_who_ask(self) -> None:
        with MetricsEndpoint("127.0.0.1:0") as endpoint:
            request = urllib.request.Request(
                endpoint.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
            )
            with urllib.request.urlopen(request, timeout=5) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
                assert answer.read() == b"# EOF\n"
                assert "Python" not in answer.headers["Server"]


class FakeNvml:
    """pynvml, of a machine with one GPU."""

    class NVMLError(Exception):
        pass

    is_lost = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-7"
        return "handle"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(used=10, total=40)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=75)


def test_gpu_metrics_are_there_where_nvml_is_and_gone_when_it_fails(lab) -> None:
    backend, nvml = lab.make_backend(NUM_BLOCKS), FakeNvml()
    metrics = ServerMetrics(backend.info, backend.stats(), model="m", gpu=NvmlReader(nvml, "GPU-7"))

    def read() -> dict[str, tuple[str, float]]:
        families = {family.name: family.samples for family in metrics.collect()}
        found = {name: families[name][0] for name in (metric.name for metric in GPU_METRICS) if name in families}
        return {name: (sample.labels["gpu"], sample.value) for name, sample in found.items()}

    assert read() == {
        catalogue.GPU_MEMORY_USED.name: ("3", 10.0),
        catalogue.GPU_MEMORY_TOTAL.name: ("3", 40.0),
        catalogue.GPU_UTILIZATION.name: ("3", 0.75),
    }
    nvml.is_lost = True
    assert read() == {}
    backend.close()
