"""Metrics are on where the config says so: with pagedkv serve, and not elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.integration.cli import serve
from pagedkv.integration.serve.metrics.endpoint import MetricsEndpoint
from pagedkv.integration.serve.observers import open_observers
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.observer import Observers, Refusal


@pytest.mark.parametrize("listen", ["", "auto"])
def test_off_means_no_endpoint_and_nobody_who_watches(lab, listen: str) -> None:
    backend = lab.make_backend(8)
    with open_observers(parse_config({"metrics": {"listen": listen}}), ShardInfo()) as observers:
        assert observers.metrics_url == ""
        assert observers.observe(backend) == Observers()
    backend.close()


def test_serve_has_metrics_by_default_and_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKV_METRICS_LISTEN", raising=False)
    assert serve._load(None, {}, 1).metrics.listen == serve.DEFAULT_METRICS_ADDRESS
    assert serve._load(None, {"metrics.listen": ""}, 1).metrics.listen == ""
    assert serve._load(None, {"metrics.listen": "127.0.0.1:1"}, 1).metrics.listen == "127.0.0.1:1"
    assert serve.DEFAULT_METRICS_ADDRESS.startswith("127.0.0.1:")


def test_serve_says_before_it_loads_a_model_that_the_metrics_port_is_taken(pagedkv, tmp_path: Path) -> None:
    with MetricsEndpoint("127.0.0.1:0") as endpoint:
        address = endpoint.url.removeprefix("http://").removesuffix("/metrics")
        outcome = pagedkv("serve", tmp_path, "--metrics-listen", address)
    assert outcome.code == 2
    assert address in outcome.err
    assert "--metrics-listen" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_watcher_that_fails_is_logged_and_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard = []

    class Broken:
        def on_refusal(self, reason: Refusal, num_requests: int) -> None:
            raise ZeroDivisionError

    class Whole:
        def on_refusal(self, reason: Refusal, num_requests: int) -> None:
            heard.append((reason, num_requests))

    Observers(requests=(Broken(), Whole())).report_refusal(Refusal.INVALID, 2)
    assert heard == [(Refusal.INVALID, 2)]
    assert "Broken failed" in caplog.text
