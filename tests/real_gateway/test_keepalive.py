"""A request that says nothing for longer than gRPC's default servers bear pings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .conftest import MODEL_NAME, SETTINGS
from .deployment import Launch

SILENT_S = 190
"""gRPC's defaults send the gateway away after some of its pings, 30 s apart."""
SCHEDULER = f"""
import time
from pagedkv.plugin.scheduler.continuous import ContinuousScheduler

class Silent(ContinuousScheduler):
    was_silent = False

    def schedule(self, only=None, max_chunk_tokens=None):
        if self._waiting and not Silent.was_silent:
            Silent.was_silent = True
            time.sleep({SILENT_S})
        return super().schedule(only, max_chunk_tokens)
"""
QUIET_FLAGS = (
    *("--policy", "round_robin", "--disable-health-check", "--load-monitor-interval", "3600"),
    *("--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
)
"""Nothing else passes between gateway and worker, which would hide the silence."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a distribution whose scheduler sleeps before the first prompt."""
    info = tmp_path / "silent-1.0.dist-info"
    info.mkdir()
    (tmp_path / "silent_scheduler.py").write_text(SCHEDULER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: silent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagedkv.schedulers]\nsilent = silent_scheduler:Silent\n")
    return tmp_path


@pytest.mark.slow
def test_a_silent_request_of_more_than_two_minutes_lives(launch: Launch, tiny_model: Path, site: Path) -> None:
    settings = (*SETTINGS, "scheduler.name=silent", "server.stuck_step_timeout_s=600")
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))}
    with launch.deployment(tiny_model, settings=settings, flags=QUIET_FLAGS, environ=environ) as gateway:
        started_s = time.monotonic()
        body = {"model": MODEL_NAME, "prompt": "Say nothing for long.", "max_tokens": 3, "temperature": 0}
        status, answer = gateway.post("/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert time.monotonic() - started_s >= SILENT_S
        (worker,) = gateway.workers
        assert worker.metric("pagedkv_time_to_first_token_seconds_count") == 1, "it was not sent a second time"
