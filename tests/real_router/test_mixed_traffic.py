"""Clients of every kind at once: for some seconds here, by hand for as long as variables say."""

from __future__ import annotations

import json
import os

import pytest

from .deployment import Deployment
from .mixed_traffic import MixedTraffic
from .reference import Reference

DURATION_VARIABLE, SEED_VARIABLE = "PAGEDKV_ROUTER_TRAFFIC_S", "PAGEDKV_ROUTER_TRAFFIC_SEED"


@pytest.mark.timeout(0)
def test_mixed_traffic_goes_well(
    deployment: Deployment, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = MixedTraffic(deployment, reference, int(os.environ.get(SEED_VARIABLE, "0")))
    summary = traffic.run(float(os.environ.get(DURATION_VARIABLE, "15")))
    with capsys.disabled():
        print("\n" + json.dumps(vars(summary)))
    assert summary.faults == []
    assert summary.num_blocks_left == 0
    assert min(summary.num_probes, summary.num_health_checks) > 0
