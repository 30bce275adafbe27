"""Whether other programs took part of the machine while something was timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil  # type: ignore[import-untyped, unused-ignore]  # its stubs are in the extra dev

MAX_SHARE = 0.05
_MAX_TRIES = 3

Result = TypeVar("Result")


def run_undisturbed(call: Callable[[int], Result]) -> tuple[Result, float]:
    """Calls again where other programs took more than MAX_SHARE of the cores, at most _MAX_TRIES times.

    Args:
        call: is given the number of the try, from 0.

    Returns:
        The least disturbed result, and the share of the cores that others took during it.
    """
    results: list[tuple[Result, float]] = []
    while not results or (results[-1][1] > MAX_SHARE and len(results) < _MAX_TRIES):
        wall_s, busy_s, own_s = time.perf_counter(), _busy_s(), _own_s()
        result = call(len(results))
        others_s = _busy_s() - busy_s - (_own_s() - own_s)
        available_s = (psutil.cpu_count() or 1) * (time.perf_counter() - wall_s)
        results.append((result, max(0.0, others_s / available_s)))
    return min(results, key=lambda one: one[1])


def _busy_s() -> float:
    """Of all cores since the machine started."""
    times = psutil.cpu_times()
    # On Linux the time of guests is part of user and nice already.
    parts = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, part, 0.0) for part in parts))


def _own_s() -> float:
    """Of this process and those that it started and that still live."""
    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return float(sum(one.user + one.system for one in times))
