"""Repetitions to figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pagedkv.integration.measure.benchmark.engine_process import Repetition
from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """None for no values."""
        known = list(values)
        return cls(*np.percentile(known, (50, 90, 99)).tolist()) if known else None


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine on one workload, all repetitions. None where the engine does not tell."""

    seconds: tuple[float, ...]
    """Of each repetition, from the start to the last token."""
    median_seconds: float
    new_tokens: int
    """Of one repetition."""
    tokens_per_s: float
    """New tokens over the median."""
    requests_per_s: float
    ttft_s: Percentiles | None
    """Time to the first token since the request's arrival, over the requests of all repetitions."""
    tpot_s: Percentiles | None
    """Time a token after the first; requests for a single token have none."""
    longest_gap_s: float
    """Between two tokens of a request."""
    peak_kv_bytes: int | None
    """Held for live requests, at most."""
    waste: float | None
    """Share of the held bytes in which no token was, over all steps, 0..1."""
    prefix_hit_rate: float | None
    """Prompt tokens whose KV was found instead of computed, 0..1."""
    peak_running: int | None
    """Requests that were held at the same time, at most."""


def summarize(repetitions: Sequence[Repetition]) -> Figures:
    seconds = tuple(repetition.seconds for repetition in repetitions)
    times = [one for repetition in repetitions for one in repetition.requests]
    first, middle = repetitions[0], median(seconds)
    return Figures(
        seconds=seconds,
        median_seconds=middle,
        new_tokens=first.new_tokens,
        tokens_per_s=first.new_tokens / middle,
        requests_per_s=len(first.requests) / middle,
        ttft_s=Percentiles.of(one.ttft_s for one in times),
        tpot_s=Percentiles.of(time_per_token(one) for one in times if one.num_tokens > 1),
        longest_gap_s=max(one.longest_gap_s for one in times),
        peak_kv_bytes=_largest(repetitions, "peak_kv_bytes"),
        waste=_mean(repetitions, "waste"),
        prefix_hit_rate=_hit_rate(repetitions),
        peak_running=_largest(repetitions, "peak_running"),
    )


def time_per_token(times: RequestTimes) -> float:
    """Mean seconds a token after the first, of a request with several."""
    return (times.end_s - times.ttft_s) / (times.num_tokens - 1)


def _known(repetitions: Sequence[Repetition], key: str) -> list[Any]:
    values = [repetition.cache.get(key) for repetition in repetitions]
    return [value for value in values if value is not None]


def _largest(repetitions: Sequence[Repetition], key: str) -> int | None:
    return max(_known(repetitions, key), default=None)


def _mean(repetitions: Sequence[Repetition], key: str) -> float | None:
    values = _known(repetitions, key)
    return sum(values) / len(values) if values else None


def _hit_rate(repetitions: Sequence[Repetition]) -> float | None:
    """None unless each request's cached tokens are known."""
    cached = [one.num_cached_tokens for repetition in repetitions for one in repetition.requests]
    known = [count for count in cached if count is not None]
    num_prompt_tokens = sum(repetition.prompt_tokens for repetition in repetitions)
    return sum(known) / num_prompt_tokens if len(known) == len(cached) else None
