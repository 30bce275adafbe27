"""Measures what each knob of TUNING.md does: `python integration/measure/tuning/run.py [--knob NAME …] [--repeat N]`.

For each value of a knob an engine is started, as in `pagedkv bench`. The engines take turns on the same requests,
repetition by repetition, and are stopped while another one runs. The run writes `integration/docs/tuning/figures.json`,
a plot for each knob beside it, and the tables of `integration/docs/TUNING.md`; knobs that are not named keep their
figures. With `--journal DIR` an interrupted run continues. `--draw` measures nothing and draws the JSON file's figures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pagedkv.integration.demo_model import ensure_demo_model
from pagedkv.integration.measure.benchmark.engine_process import EngineProcess, EngineSpec, Repetition
from pagedkv.integration.measure.benchmark.experiment import BenchmarkOptions, plan_experiment
from pagedkv.integration.measure.benchmark.journal import Journal
from pagedkv.integration.measure.benchmark.machine import describe_machine
from pagedkv.integration.measure.benchmark.runners.protocol import RunRequest
from pagedkv.integration.measure.extra import require_bench_extra
from pagedkv.integration.measure.micro.disturbance import run_undisturbed
from pagedkv.integration.measure.tuning.knobs import KNOBS, Knob, Load
from pagedkv.integration.measure.tuning.report import KnobFigures, insert_tables, read_figures, save_plot

DOCS = Path(__file__).resolve().parents[2] / "docs"
_TIMEOUT_S = 600.0
_ATTEMPT = 1000
"""Distance between the numbers of a repetition's tries; larger than any number of repetitions."""
_NUM_WARMUP_REQUESTS = 4
_WARMUP_NEW_TOKENS = 16


def measure_knob(
    knob: Knob, specs: Sequence[EngineSpec], tokens: Sequence[int], num_repetitions: int, journal: Journal
) -> KnobFigures:
    """Runs the repetitions that the journal does not have.

    Args:
        specs: an engine for each value, named as the value.
        tokens: ids from which prompts are made.

    Raises:
        EngineFailedError: an engine did not start, ended, or made too few tokens.
    """
    with tempfile.TemporaryDirectory(prefix="pagedkv-tuning-") as folder, ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for number, load, spec in _remaining_jobs(knob, specs, num_repetitions, journal):
            if spec.name not in engines:
                engine = stack.enter_context(EngineProcess(spec, Path(folder), _TIMEOUT_S))
                journal.add_engine(spec.name, engine.info)
                engine.run(_draw_warmup(knob, tokens))
                engines[spec.name] = engine
            repetition = _run_once(engines[spec.name], load, tokens, number)
            journal.add(load.name, spec.name, number, repetition)
    repetitions: dict[tuple[str, str], list[Repetition]] = {}
    for number in range(num_repetitions):
        for load in knob.loads:
            for spec in specs:
                found = journal.find(load.name, spec.name, number)
                assert found is not None, "all jobs have run"
                repetitions.setdefault((load.name, spec.name), []).append(found)
    return read_figures(knob, repetitions)


def _run_once(engine: EngineProcess, load: Load, tokens: Sequence[int], number: int) -> Repetition:
    """Runs a repetition; again, with other prompts, if other programs disturbed it. Adds their share to `cache`."""
    repetition, share = run_undisturbed(lambda attempt: engine.run(load.draw(tokens, number + _ATTEMPT * attempt)))
    return replace(repetition, cache={**repetition.cache, "other_programs_share": share})


def _remaining_jobs(
    knob: Knob, specs: Sequence[EngineSpec], num_repetitions: int, journal: Journal
) -> list[tuple[int, Load, EngineSpec]]:
    """Lists the jobs that the journal does not have, with the number of the repetition.

    Each repetition begins with another engine, so that no engine always runs after the same one.
    """
    return [
        (number, load, spec)
        for number in range(num_repetitions)
        for load in knob.loads
        for spec in [*specs[number % len(specs) :], *specs[: number % len(specs)]]
        if journal.find(load.name, spec.name, number) is None
    ]


def _draw_warmup(knob: Knob, tokens: Sequence[int]) -> list[RunRequest]:
    """Makes a few requests of each load with short answers, all at once, that no repetition has."""
    requests = [request for load in knob.loads for request in load.draw(tokens, -1)[:_NUM_WARMUP_REQUESTS]]
    return [
        replace(request, max_new_tokens=min(request.max_new_tokens, _WARMUP_NEW_TOKENS), arrival_s=0.0)
        for request in requests
    ]


def measure(names: Sequence[str], model: Path, num_repetitions: int, journals: Path | None) -> dict[str, Any]:
    """Measures the named knobs. Returns their content of the JSON file."""
    tokens = plan_experiment(BenchmarkOptions(model, ["short"], ["paged"])).settings.plain_tokens
    about = {
        "model": model.name,
        "machine": asdict(describe_machine()),
        "versions": {name: importlib.metadata.version(name) for name in ("pagedkv", "torch", "transformers")},
    }
    measured = {}
    for knob in KNOBS:
        if knob.name in names:
            specs = knob.make_specs(str(model.absolute()))
            run = {
                **about,
                "commands": [list(spec.command) for spec in specs],
                "loads": [{load.name: load.description for load in knob.loads}],
            }
            journal = Journal(journals and journals / f"{knob.name}.jsonl", run)
            figures = measure_knob(knob, specs, tokens, num_repetitions, journal)
            measured[knob.name] = {**about, "repetitions": num_repetitions, **figures.to_json()}
    return measured


def write(figures: dict[str, Any], folder: Path, guide: Path) -> None:
    """Writes JSON, plots and tables. Keeps the figures of other knobs in the folder's JSON."""
    file = folder / "figures.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known.update(figures)
    ordered = {knob.name: known[knob.name] for knob in KNOBS if knob.name in known}
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    read = {name: KnobFigures.from_json(of_knob) for name, of_knob in ordered.items()}
    for name, of_knob in read.items():
        save_plot(of_knob, folder / f"{name}.png")
    guide.write_text(insert_tables(guide.read_text(encoding="utf-8"), read), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what each knob of TUNING.md does.")
    names = [knob.name for knob in KNOBS]
    parser.add_argument("--knob", action="append", choices=names, help="only this one; may be given again")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions")
    parser.add_argument("--model", type=Path, help="directory of a model; the demo model if left out")
    parser.add_argument("--journal", type=Path, help="folder that remembers repetitions")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what is there")
    arguments = parser.parse_args()
    require_bench_extra()
    if arguments.journal:
        arguments.journal.mkdir(parents=True, exist_ok=True)
    figures = {}
    if not arguments.draw:
        model = arguments.model or ensure_demo_model()
        figures = measure(arguments.knob or names, model, arguments.repeat, arguments.journal)
    write(figures, DOCS / "tuning", DOCS / "TUNING.md")


if __name__ == "__main__":
    main()
