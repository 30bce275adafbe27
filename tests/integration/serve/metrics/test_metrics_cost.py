"""The benchmark of the metrics' cost measures what it says."""

from __future__ import annotations

import pytest

from pagedkv.integration.measure.micro.metrics_cost import SCRAPE_INTERVAL_S, measure
from pagedkv.plugin.interface import WarmupLimits


def test_share_is_that_of_the_metrics_and_nothing_is_left_behind(lab) -> None:
    backend = lab.make_backend(256)
    backend.warmup(WarmupLimits())
    cost = measure(backend, num_sequences=4, num_steps=2)
    assert min(cost.step_ms, cost.after_step_ms, cost.request_ms, cost.scrape_ms) > 0
    assert cost.share == pytest.approx(cost.after_step_ms / cost.step_ms + cost.scrape_ms / SCRAPE_INTERVAL_S / 1e3)
    assert backend.stats().num_used_blocks == 0
    backend.close()
