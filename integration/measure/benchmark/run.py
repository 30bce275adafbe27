"""`pagedkv bench` without its command line: runs an experiment and returns a report."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagedkv.integration.measure.benchmark.experiment import BenchmarkOptions, Experiment
from pagedkv.integration.measure.benchmark.journal import Journal
from pagedkv.integration.measure.benchmark.machine import describe_machine
from pagedkv.integration.measure.benchmark.report import Report
from pagedkv.integration.measure.benchmark.suite import count_calls, run_rounds
from pagedkv.integration.measure.benchmark.summary import Figures, summarize

_LIBRARIES = ("pagedkv", "torch", "transformers")


class _Progress:
    """A progress bar on standard error that shows the current action."""

    def __init__(self, num_calls: int) -> None:
        self._bar = tqdm(total=num_calls, unit="run", disable=False)
        self._has_begun = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._has_begun:
            self._bar.update(1)
        self._bar.close()

    def show(self, engine: str, what: str) -> None:
        # Called when an action begins, which means that the one before it has ended.
        self._bar.update(1 if self._has_begun else 0)
        self._has_begun = True
        self._bar.set_description(f"{engine}: {what}")


def run_benchmark(options: BenchmarkOptions, plan: Experiment, journal_file: Path | None = None) -> Report:
    """Runs an experiment, with a progress bar on standard error.

    Args:
        journal_file: repetitions in this file are not run again.

    Raises:
        ConfigError: the journal belongs to another run.
        EngineFailedError: an engine failed.
    """
    settings = describe_settings(options, plan)
    machine = describe_machine()
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    run = {"machine": asdict(machine), "versions": versions, "settings": settings, "rounds": _describe_bouts(plan)}
    journal = Journal(journal_file, run)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _Progress(count_calls(plan.rounds, plan.settings, journal)) as progress:
        run_rounds(plan.rounds, plan.settings, journal, progress.show)
    return Report(
        model=options.model.name,
        started=started,
        machine=machine,
        versions=versions,
        settings={"repetitions": options.num_repetitions, **settings},
        shapes={shape.name: shape.describe() for shape in plan.shapes},
        engines=journal.engines,
        workloads=_summarize_all(plan, journal),
    )


def describe_settings(options: BenchmarkOptions, plan: Experiment) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "scale": options.scale,
        "arrivals": options.arrivals.describe(),
        "dtype": plan.dtype,
        "kv_memory": options.kv_memory,
    }


def _describe_bouts(plan: Experiment) -> list[dict[str, Any]]:
    return [
        {
            "workloads": [shape.name for shape in round_.shapes],
            "commands": [list(spec.command) for spec in round_.engines],
        }
        for round_ in plan.rounds
    ]


def _summarize_all(plan: Experiment, journal: Journal) -> dict[str, dict[str, Figures]]:
    summaries: dict[str, dict[str, Figures]] = {}
    for round_ in plan.rounds:
        for shape in round_.shapes:
            of_workload = summaries.setdefault(shape.name, {})
            for spec in round_.engines:
                found = (journal.find(shape.name, spec.name, n) for n in range(plan.settings.num_repetitions))
                of_workload[spec.name] = summarize([repetition for repetition in found if repetition is not None])
    return summaries
