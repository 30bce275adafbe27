"""The scheduler suite finds a scheduler that does not treat the caller's tokens as the caller's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

import pytest

from pagedkv.plugin.conformance import scheduler as suite
from pagedkv.plugin.errors import IntegrityError
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.scheduler.continuous import ContinuousScheduler
from pagedkv.plugin.step_plan import NewSequence, StepPlan


class CopyingScheduler(ContinuousScheduler):
    """Works on a copy of the prompt, which never grows."""

    def add(self, sequence: NewSequence) -> None:
        super().add(replace(sequence, token_ids=list(sequence.token_ids)))


class AppendingScheduler(ContinuousScheduler):
    """Appends to the caller's list."""

    def commit(self, plan: StepPlan, finished: Collection[RequestId]) -> None:
        super().commit(plan, finished)
        for row in plan.scheduled:
            if row.id not in finished:
                self._live[row.id].token_ids.append(5)  # type: ignore[attr-defined]


class Suite(suite.SchedulerConformance):
    scheduler_name: ClassVar[str] = "under test"


@pytest.mark.parametrize("scheduler", [CopyingScheduler, AppendingScheduler])
def test_a_scheduler_that_copies_or_appends_fails(
    scheduler: type[ContinuousScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = suite.load_plugin
    monkeypatch.setattr(
        suite, "load_plugin", lambda group, name: scheduler if name == "under test" else load(group, name)
    )
    with pytest.raises((AssertionError, IntegrityError)):
        Suite().test_tokens_are_the_callers_list_read_as_it_grows_and_never_changed()
