"""Dashboard and alert rules ask for what the endpoint serves."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.transformers.contiguous_backend import ContiguousBackend
from pagedkv.integration.serve.metrics.catalogue import BASE_LABELS, CATALOGUE, GPU_METRICS
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings

DEPLOY = Path(__file__).resolve().parents[4] / "integration" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/pagedkv.json").read_text(encoding="utf-8"))
GROUPS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SCRAPE_INTERVAL_S = 0.5
ROUTER_METRICS = {
    "tgi_queue_size",
    "tgi_batch_current_max_tokens",
    "tgi_request_success",
    "tgi_request_failure",
    "tgi_request_duration_bucket",
    "tgi_request_queue_duration_bucket",
}
"""Some of what text-generation-inference's router 3.3.6 serves. Its durations have no unit in their names."""
NUM_ROUNDS = 8


def _queries() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def _metric_names(query: str) -> set[str]:
    """Names in a query; what stands in quotes is none."""
    return set(re.findall(r"\bpagedkv[a-z0-9_:]*", re.sub(r'"[^"]*"', '""', query)))


def _router_metric_names(query: str) -> set[str]:
    return set(re.findall(r"\btgi_[a-z_]*", re.sub(r'"[^"]*"', '""', query)))


def _labels(query: str) -> set[str]:
    named = re.findall(r"([a-z_]+)\s*=~?\s*\"", query)
    grouped = [
        part.strip() for group in re.findall(r"(?:by|without|on) \(([^)]*)\)", query) for part in group.split(",")
    ]
    return {*named, *grouped}


def test_queries_and_rules_name_only_what_is_served(lab) -> None:
    async def run() -> set[str]:
        async with lab.serve(lab.make_backend(16)) as served:
            return {name for name, _ in served.scrape().samples}

    served_names = asyncio.run(run()) | {metric.name for metric in GPU_METRICS}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    queries = [*_queries(), *(rule["expr"] for rule in RULES)]
    assert len(queries) > 40
    for query in queries:
        assert _metric_names(query) - recorded <= served_names, query
        assert _router_metric_names(query) <= ROUTER_METRICS, query
        own = {metric.label for metric in CATALOGUE if metric.label}
        known = {*BASE_LABELS, "le", "instance", "job", "gpu", "server", "err", *own}
        assert _labels(query) <= known, query


def test_a_row_joins_the_router_s_metrics_and_ours_by_their_host() -> None:
    """The two have ports of their own, so that the label `instance` differs."""
    joined = [query for query in _queries() if _router_metric_names(query) or "label_replace" in query]
    assert set().union(*map(_router_metric_names, joined)) == ROUTER_METRICS
    for query in joined:
        assert '"server", "$1", "instance", "([^:]+).*"' in query
        assert "by (server" in query or "by (le, server" in query


def test_durations_are_told_apart_up_to_ten_minutes_and_tokens_up_to_ten_seconds() -> None:
    """Behind a router that queues, on CPUs, p99 of 90 s must not be shown as 60."""
    last = {metric.name: metric.buckets[-1] for metric in CATALOGUE if metric.unit == "seconds" and metric.buckets}
    assert last.pop("pagedkv_time_per_output_token_seconds") == 10
    assert len(last) == 4
    assert set(last.values()) == {600}


def test_every_metric_that_matters_to_a_reader_is_on_the_dashboard() -> None:
    shown = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for query in _queries()
        for name in _metric_names(query)
    }
    left_out = {metric.name for metric in CATALOGUE} - shown
    assert left_out == {
        "pagedkv_cache_total_blocks",
        "pagedkv_last_step_timestamp_seconds",
        "pagedkv_info",
    }


def test_alerts_are_those_that_the_promtool_tests_fire() -> None:
    tests = yaml.safe_load((DEPLOY / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    fired = {check["alertname"] for check in checks if check["exp_alerts"]}
    silent = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert fired == silent == {rule["alert"] for rule in RULES if "alert" in rule}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]])
def test_promtool_is_content(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_datasource_and_dashboard() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in compose["grafana"]["volumes"])
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/pagedkv.yaml").read_text())["providers"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    (prometheus,) = yaml.safe_load_all((DEPLOY / "prometheus.yaml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(set(titles)) == len(ids)


def _make_contiguous(folder: Path) -> ContiguousBackend:
    """Over a Llama of one layer with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape = LlamaConfig(vocab_size=97, num_hidden_layers=1, max_position_embeddings=256, eos_token_id=0, **sizes)
    LlamaForCausalLM(shape).save_pretrained(folder)
    keys = {"model": {"path": str(folder), "dtype": "float32", "device": "cpu"}, "cache": {"memory": "64KiB"}}
    config = parse_config({**keys, "backend": "contiguous"})
    spec = load_plugin(MODELS, "transformers").describe(resolve_model_settings(config))
    return ContiguousBackend.create(resolve_config(config, spec))


@contextmanager
def _prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """A real Prometheus that scrapes the targets; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = {"job_name": "pagedkv", "static_configs": [{"targets": targets}]}
    interval = f"{int(SCRAPE_INTERVAL_S * 1000)}ms"
    config = {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", *flags, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_scraped(f"http://{address}", len(targets), folder / "prometheus.log")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


class _Router(BaseHTTPRequestHandler):
    """Metrics as text-generation-inference's router serves them, of one that has had some requests and errors."""

    num_scrapes = 0

    def do_GET(self) -> None:
        type(self).num_scrapes += 1
        count = self.num_scrapes
        lines = ["tgi_queue_size 3", "tgi_batch_current_max_tokens 4096", f"tgi_request_success {count}"]
        lines.append(f'tgi_request_failure{{err="validation"}} {count}')
        for name in ("tgi_request_duration", "tgi_request_queue_duration"):
            lines += [f'{name}_bucket{{le="{bound}"}} {count}' for bound in ("0.1", "1.5", "+Inf")]
            lines += [f"{name}_sum {count}", f"{name}_count {count}"]
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def _router_s_metrics() -> Iterator[str]:
    """The target of a router's metrics."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Router)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _wait_until_scraped(url: str, num_targets: int, log: Path) -> None:
    """Prometheus takes some seconds until it first looks at its targets."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with suppress(urllib.error.URLError, ConnectionError):
            if [value for _, value in _evaluate(url, "up")] == [1.0] * num_targets:
                return
        time.sleep(0.2)
    pytest.fail(log.read_text())


def _evaluate(url: str, query: str) -> list[tuple[dict[str, str], float]]:
    filled = query.replace("$__rate_interval", f"{int(4 * SCRAPE_INTERVAL_S)}s").replace("$instance", ".*")
    with urllib.request.urlopen(
        f"{url}/api/v1/query?{urllib.parse.urlencode({'query': filled})}", timeout=10
    ) as answer:
        result = json.load(answer)["data"]["result"]
    return [(one["metric"], float(one["value"][1])) for one in result]


async def _load(lab, served: Any, number: int) -> None:
    """A prompt that is known, one that is new beside it, and more of them than run at once."""
    await served.clear()
    first = await served.prefill(1, lab.ask(1, "the same prompt every time, of forty letters", 3))
    await served.prefill(2, *[lab.ask(100 + i, f"{number}{i}" * 20, 12) for i in range(5)], running=first.batch)
    for _ in range(3):
        await served.decode(1)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_every_query_of_the_dashboard_returns_data_from_running_servers(lab, tmp_path: Path) -> None:
    async def run() -> dict[str, list[tuple[dict[str, str], float]]]:
        async with AsyncExitStack() as stack:
            paged = await stack.enter_async_context(lab.serve(lab.make_backend(24), name="paged"))
            contiguous = await stack.enter_async_context(lab.serve(_make_contiguous(tmp_path / "model"), name="other"))
            router = stack.enter_context(_router_s_metrics())
            targets = [one.observers.metrics_url.split("/")[2] for one in (paged, contiguous)]
            url = await asyncio.to_thread(stack.enter_context, _prometheus(tmp_path, [*targets, router]))
            for number in range(NUM_ROUNDS):
                for served in (paged, contiguous):
                    await _load(lab, served, number)
                await asyncio.sleep(SCRAPE_INTERVAL_S)
            found = {query: await asyncio.to_thread(_evaluate, url, query) for query in _queries()}
            for served in (paged, contiguous):
                await served.clear()
            return found

    found = asyncio.run(run())
    gpu_names = {metric.name for metric in GPU_METRICS}
    for query, result in found.items():
        if not _metric_names(query) & gpu_names:
            assert [value for _, value in result if not math.isnan(value)], f"{query} returns nothing"
    side_by_side = [query for query in found if "by (backend)" in query and "hit" not in query]
    assert all({labels["backend"] for labels, _ in found[query]} == {"paged", "contiguous"} for query in side_by_side)
