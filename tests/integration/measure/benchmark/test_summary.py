"""Percentiles, and what becomes of repetitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.integration.measure.benchmark.engine_process import Repetition
from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes
from pagedkv.integration.measure.benchmark.summary import Percentiles, percentile, summarize

VALUES = st.lists(st.floats(min_value=-1e6, max_value=1e6, allow_nan=False), min_size=1, max_size=40)
PERCENTS = st.floats(min_value=0, max_value=100, allow_nan=False)


@given(VALUES, PERCENTS)
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(VALUES, st.tuples(PERCENTS, PERCENTS).map(sorted), st.randoms())
def test_percentiles_rise_within_the_values_whatever_their_order(values: list[float], percents, random) -> None:
    low, high = (percentile(values, percent) for percent in percents)
    assert min(values) <= low <= high + 1e-9
    assert high <= max(values)
    shuffled = random.sample(values, len(values))
    assert [percentile(shuffled, percent) for percent in percents] == [low, high]


@given(st.floats(min_value=-1e6, max_value=1e6), st.integers(1, 9), PERCENTS)
def test_percentile_of_equal_values_is_that_value(value: float, count: int, percent: float) -> None:
    assert percentile([value] * count, percent) == value


def test_percentiles_of_nothing_are_none() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([1.0]) == Percentiles(1.0, 1.0, 1.0)


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
