"""The run itself: engines side by side, repetition by repetition."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.integration.benchmark.engine_process import EngineProcess, EngineSpec, Repetition
from pagedkv.integration.benchmark.workloads import ALL_AT_ONCE, Arrivals, Shape, draw_warmup, draw_workload

OnRun = Callable[[str, str], None]
"""Called with engine and what it does, before it does it."""


@dataclass(frozen=True, slots=True)
class Bout:
    """Workloads that run on the same engines."""

    shapes: Sequence[Shape]
    engines: Sequence[EngineSpec]

    def num_runs(self, num_repetitions: int) -> int:
        """Calls of `OnRun`: a start and a warm-up each, and every repetition."""
        return len(self.engines) * (2 + len(self.shapes) * num_repetitions)


@dataclass(frozen=True, slots=True)
class RunSettings:
    plain_tokens: Sequence[int]
    arrivals: Arrivals = ALL_AT_ONCE
    num_repetitions: int = 3
    seed: int = 0
    timeout_s: float = 1800.0


@dataclass
class Results:
    """By workload and engine, in the order of the first runs."""

    repetitions: dict[str, dict[str, list[Repetition]]]
    engines: dict[str, dict[str, Any]]
    """What each engine says of itself."""

    def add(self, workload: str, engine: str, repetition: Repetition) -> None:
        self.repetitions.setdefault(workload, {}).setdefault(engine, []).append(repetition)


def run_bouts(bouts: Sequence[Bout], settings: RunSettings, on_run: OnRun) -> Results:
    """Runs everything. Of the engines one at a time computes, the others are stopped.

    Raises:
        EngineFailedError: an engine did not start, ended, or made too few tokens.
    """
    results = Results({}, {})
    with tempfile.TemporaryDirectory(prefix="pagedkv-bench-") as folder:
        for bout in bouts:
            _run_bout(bout, settings, results, on_run, Path(folder))
    return results


def _run_bout(bout: Bout, settings: RunSettings, results: Results, on_run: OnRun, folder: Path) -> None:
    with ExitStack() as stack:
        engines = []
        for spec in bout.engines:
            on_run(spec.name, "loads")
            engines.append(stack.enter_context(EngineProcess(spec, folder, settings.timeout_s)))
        warmup = draw_warmup(bout.shapes, settings.plain_tokens, settings.seed)
        for engine in engines:
            results.engines.setdefault(engine.name, dict(engine.info))
            on_run(engine.name, "warms up")
            engine.run(warmup)
        for number in range(settings.num_repetitions):
            for shape in bout.shapes:
                requests = draw_workload(shape, settings.arrivals, settings.plain_tokens, settings.seed, number)
                for engine in _rotate(engines, number):
                    on_run(engine.name, shape.name)
                    results.add(shape.name, engine.name, engine.run(requests))


def _rotate(engines: Sequence[EngineProcess], number: int) -> Iterator[EngineProcess]:
    """Each repetition another engine begins, so that none always runs behind the same one."""
    return (engines[(index + number) % len(engines)] for index in range(len(engines)))
