"""The benchmark of steps in the server measures what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.integration.measure.micro import server_step
from pagedkv.integration.measure.micro.server_step import StepTimes


def test_every_way_to_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, save_tiny_llama: Callable[..., Path]) -> None:
    monkeypatch.setattr(server_step, "NUM_NEW_TOKENS", 10)
    monkeypatch.setattr(server_step, "SETTINGS", {"cache.num_blocks": 64, "limits.max_total_tokens": 512})
    (times,) = server_step.measure(save_tiny_llama(num_hidden_layers=1), row_counts=[2], repetitions=1)
    assert times.num_rows == 2
    assert list(times.step_ms) == ["engine", "other thread", "tgi", "tgi, paused", "smg"]
    assert min(*times.step_ms.values(), times.client_ms) > 0


def test_a_step_beyond_the_bar_is_named() -> None:
    times = [StepTimes(1, {"engine": 10.0, "tgi": 10.9}, 0.1), StepTimes(8, {"engine": 10.0, "tgi": 11.1}, 0.1)]
    assert server_step.find_missed_bars(times) == [(8, "tgi")]
