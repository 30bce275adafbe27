"""`pagedkv bench` without its command line: a plan in, a report out."""

from __future__ import annotations

import importlib.metadata
from datetime import datetime, timezone

from tqdm import tqdm

from pagedkv.integration.benchmark.machine import describe_machine
from pagedkv.integration.benchmark.planning import Plan, Wishes
from pagedkv.integration.benchmark.report import Report
from pagedkv.integration.benchmark.suite import run_bouts
from pagedkv.integration.benchmark.summary import summarize

_LIBRARIES = ("pagedkv", "torch", "transformers")


def run_benchmark(wishes: Wishes, plan: Plan) -> Report:
    """Runs a plan, with a progress bar on standard error. Raises EngineFailedError."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    num_runs = sum(bout.num_runs(wishes.num_repetitions) for bout in plan.bouts)
    with tqdm(total=num_runs, unit="run") as bar:
        is_first = True

        def show(engine: str, what: str) -> None:
            nonlocal is_first
            bar.update(0 if is_first else 1)
            is_first = False
            bar.set_description(f"{engine}: {what}")

        results = run_bouts(plan.bouts, plan.settings, show)
        bar.update(1)
    return Report(
        model=wishes.model.name,
        started=started,
        machine=describe_machine(),
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES},
        settings={
            "repetitions": wishes.num_repetitions,
            "seed": wishes.seed,
            "scale": wishes.scale,
            "arrivals": wishes.arrivals.describe(),
            "dtype": plan.dtype,
            "kv_memory": wishes.kv_memory,
        },
        shapes={shape.name: shape.describe() for shape in plan.shapes},
        engines=results.engines,
        workloads={
            workload: {name: summarize(repetitions) for name, repetitions in of_workload.items()}
            for workload, of_workload in results.repetitions.items()
        },
    )
