"""Runs the engines in turn, repetition by repetition."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pagedkv.integration.measure.benchmark.engine_process import EngineProcess, EngineSpec
from pagedkv.integration.measure.benchmark.journal import Journal
from pagedkv.integration.measure.benchmark.workloads import ALL_AT_ONCE, Arrivals, Shape, draw_warmup, draw_workload

OnRun = Callable[[str, str], None]
"""Called with an engine's name and its next action, before each action."""


@dataclass(frozen=True, slots=True)
class Round:
    """Workloads that run on the same engines."""

    shapes: Sequence[Shape]
    engines: Sequence[EngineSpec]


@dataclass(frozen=True, slots=True)
class RunSettings:
    plain_tokens: Sequence[int]
    arrivals: Arrivals = ALL_AT_ONCE
    num_repetitions: int = 3
    seed: int = 0
    timeout_s: float = 1800.0
    logs: Path | None = None
    """Folder for the engines' standard error; None discards it."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One engine on one workload, once."""

    shape: Shape
    engine: str
    number: int


def run_rounds(rounds: Sequence[Round], settings: RunSettings, journal: Journal, on_run: OnRun) -> None:
    """Runs everything that the journal does not have. One engine runs at a time, the others are stopped.

    Raises:
        EngineFailedError: an engine did not start, ended, or made too few tokens.
    """
    with tempfile.TemporaryDirectory(prefix="pagedkv-bench-") as temporary:
        folder = settings.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for round_ in rounds:
            _run_round(round_, settings, journal, on_run, folder)


def count_calls(rounds: Sequence[Round], settings: RunSettings, journal: Journal) -> int:
    """Counts the calls of `on_run` by `run_rounds`: one for each engine's start and warm-up, and each repetition."""
    jobs = [list(_remaining_jobs(round_, settings, journal)) for round_ in rounds]
    return sum(len(of_round) + 2 * len({job.engine for job in of_round}) for of_round in jobs)


def _run_round(round_: Round, settings: RunSettings, journal: Journal, on_run: OnRun, folder: Path) -> None:
    jobs = list(_remaining_jobs(round_, settings, journal))
    wanted = {job.engine for job in jobs}
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for spec in round_.engines:
            if spec.name in wanted:
                on_run(spec.name, "loads")
                engine = stack.enter_context(EngineProcess(spec, folder, settings.timeout_s))
                engines[spec.name] = engine
                journal.add_engine(spec.name, engine.info)
        warmup = draw_warmup(round_.shapes, settings.plain_tokens, settings.seed)
        for engine in engines.values():
            on_run(engine.name, "warms up")
            engine.run(warmup)
        for job in jobs:
            on_run(job.engine, job.shape.name)
            requests = draw_workload(job.shape, settings.arrivals, settings.plain_tokens, settings.seed, job.number)
            journal.add(job.shape.name, job.engine, job.number, engines[job.engine].run(requests))


def _remaining_jobs(round_: Round, settings: RunSettings, journal: Journal) -> Iterator[_Job]:
    """Yields the jobs that the journal does not have yet, in the order in which they run.

    Each repetition begins with another engine, so that no engine always runs after the same one.
    """
    names = [spec.name for spec in round_.engines]
    for number in range(settings.num_repetitions):
        for shape in round_.shapes:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if journal.find(shape.name, name, number) is None:
                    yield _Job(shape, name, number)
