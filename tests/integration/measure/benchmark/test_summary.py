"""Percentiles, and what becomes of repetitions."""

from __future__ import annotations

import pytest

from pagedkv.integration.measure.benchmark.engine_process import Repetition
from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes
from pagedkv.integration.measure.benchmark.summary import Percentiles, summarize


def test_percentiles_of_nothing_are_none() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([1.0]) == Percentiles(1.0, 1.0, 1.0)


def test_percentiles_lie_between_two_values_by_their_distance() -> None:
    assert Percentiles.of([4.0, 1.0, 3.0, 2.0]) == Percentiles(2.5, pytest.approx(3.7), pytest.approx(3.97))


def test_figures_are_those_of_all_repetitions() -> None:
    many = RequestTimes(num_tokens=5, ttft_s=1.0, end_s=3.0, longest_gap_s=0.8, num_cached_tokens=6)
    single = RequestTimes(num_tokens=1, ttft_s=2.0, end_s=2.0, num_cached_tokens=0)
    cache = {"peak_kv_bytes": 100, "waste": 0.25, "peak_running": 2}
    fast = Repetition(2.0, 12, 6, [many, single], cache)
    slow = Repetition(4.0, 12, 6, [many, single], {**cache, "peak_kv_bytes": 300, "waste": 0.75})
    figures = summarize([fast, slow])
    assert figures.seconds == (2.0, 4.0)
    assert figures.median_seconds == 3.0
    assert figures.tokens_per_s == pytest.approx(2.0)
    assert figures.requests_per_s == pytest.approx(2 / 3)
    assert figures.ttft_s is not None
    assert figures.ttft_s.p50 == pytest.approx(1.5)
    assert figures.tpot_s == Percentiles(0.5, 0.5, 0.5), "of the request with several tokens alone"
    assert figures.longest_gap_s == 0.8
    assert (figures.peak_kv_bytes, figures.waste, figures.peak_running) == (300, 0.5, 2)
    assert figures.prefix_hit_rate == pytest.approx(0.5)


def test_what_an_engine_does_not_tell_is_none() -> None:
    times = RequestTimes(num_tokens=1, ttft_s=1.0, end_s=1.0, num_cached_tokens=None)
    figures = summarize([Repetition(1.0, 4, 1, [times], {})])
    assert (figures.peak_kv_bytes, figures.waste, figures.peak_running, figures.prefix_hit_rate) == (None,) * 4
    assert figures.tpot_s is None
