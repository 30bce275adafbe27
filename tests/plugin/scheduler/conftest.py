"""A scheduler `continuous` over the paged cache manager, in the harness that checks every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedkv.plugin.conformance.scheduler import SchedulerConformance
from pagedkv.plugin.conformance.scheduler_harness import SchedulerHarness

MakeHarness = Callable[..., SchedulerHarness]


class _Continuous(SchedulerConformance):
    scheduler_name = "continuous"


@pytest.fixture
def make_harness() -> MakeHarness:
    """Takes the arguments of `SchedulerConformance.make_harness`."""
    return _Continuous().make_harness
