"""The measuring behind TUNING.md: its engine, its loop, its tables; and that the guide shows what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pagedkv.integration.measure.benchmark.engine_process import EngineFailedError, EngineSpec
from pagedkv.integration.measure.benchmark.journal import Journal
from pagedkv.integration.measure.benchmark.runners.protocol import RunRequest, run_once
from pagedkv.integration.measure.micro import disturbance
from pagedkv.integration.measure.tuning import run as tuning_run
from pagedkv.integration.measure.tuning.engine import TuningEngine
from pagedkv.integration.measure.tuning.knobs import KNOBS, Knob, draw_stream_and_prompt, name_value
from pagedkv.integration.measure.tuning.report import KnobFigures, insert_tables, save_plot, to_table
from pagedkv.plugin.config import load_config

GUIDE = tuning_run.DOCS / "TUNING.md"
MAX_PLOT_BYTES = 60_000
PNG_SIGNATURE = b"\x89PNG\r\n"
BY_NAME = {knob.name: knob for knob in KNOBS}
QUEUE = BY_NAME["max_num_sequences"]


@pytest.fixture
def fake_specs(fake_spec: Callable[[str], EngineSpec]) -> list[EngineSpec]:
    return [replace(fake_spec("well"), name=name_value(value)) for value in QUEUE.values]


def _measure(specs: Sequence[EngineSpec], journal: Journal, num_repetitions: int = 2) -> KnobFigures:
    return tuning_run.measure_knob(QUEUE, specs, range(100, 1000), num_repetitions, journal)


def test_every_value_runs_each_repetition_and_becomes_a_row(fake_specs: list[EngineSpec]) -> None:
    figures = _measure(fake_specs, Journal(None, {}))
    values = {column.label: column.values for column in figures.columns}
    assert values["tokens/s"] == {name_value(value): [2048.0, 2048.0] for value in QUEUE.values}
    assert values["TPOT p50, ms"]["4"] == pytest.approx([250.0, 250.0])
    assert values["KV held, MiB"]["64"] == [1.0, 1.0]
    table = to_table(figures)
    assert table[0] == "- queue: 64 × (128 → 64), all at once"
    assert table[2].startswith("| `scheduler.max_num_sequences` | queue: tokens/s |")
    assert table[4].startswith("| `4` | 2048 | 0.50 | 0.50 |")


def test_what_the_journal_has_is_not_run_again(
    fake_specs: list[EngineSpec], fake_spec: Callable[[str], EngineSpec], tmp_path: Path
) -> None:
    first = _measure(fake_specs, Journal(tmp_path / "journal", {}))
    dead = [replace(fake_spec("crash"), name=spec.name) for spec in fake_specs]
    assert _measure(dead, Journal(tmp_path / "journal", {})) == first
    with pytest.raises(EngineFailedError, match="out of memory"):
        _measure(dead, Journal(tmp_path / "journal", {}), num_repetitions=3)


def test_spread_of_repetitions_stands_beside_the_median(fake_specs: list[EngineSpec], tmp_path: Path) -> None:
    figures = _measure(fake_specs, Journal(None, {}), num_repetitions=1)
    column = replace(figures.columns[0], values={"4": [10.0, 14.0, 11.0], "8": [3.0, 3.2, 3.1]})
    figures = replace(figures, columns=[column])
    assert to_table(figures)[4:] == ["| `4` | 11 ±2 |", "| `8` | 3 |"]
    assert KnobFigures.from_json(json.loads(json.dumps(figures.to_json()))) == figures
    save_plot(figures, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_SIGNATURE)
    guide = "before\n<!-- measured: x -->\nold\n<!-- end -->\nafter\n"
    inserted = insert_tables(guide, {"x": figures})
    assert "old" not in inserted
    assert "| `4` | 11 ±2 |\n| `8` | 3 |\n<!-- end -->\nafter" in inserted
    assert insert_tables(inserted, {"x": figures}) == inserted
    with pytest.raises(ValueError, match="measured: y"):
        insert_tables(guide, {"y": figures})


@pytest.mark.parametrize(("overcommit", "peak_running"), [(1.0, 2), (2.0, 3)])
def test_router_sends_on_what_fits_by_reservations(tiny_model: Path, overcommit: float, peak_running: int) -> None:
    """10 blocks of 16 tokens: requests reserve 64 tokens and need 3 blocks in the end."""
    overrides = {
        "model.path": str(tiny_model),
        "cache.num_blocks": 10,
        "cache.block_size": 16,
        "cache.overcommit": overcommit,
        "limits.max_total_tokens": 80,
    }
    engine = TuningEngine({"config_file": None, "overrides": overrides, "reserved_new_tokens": 44})
    requests = [RunRequest(list(range(start, start + 20)), 14) for start in range(100, 1000, 100)]
    answer = run_once(engine, requests)
    assert [one["num_tokens"] for one in answer["requests"]] == [14] * 9
    assert answer["cache"]["peak_running"] == peak_running
    assert set(answer["cache"]) >= {"preemptions", "recomputed_tokens", "peak_kv_bytes", "waste"}
    with pytest.raises(RuntimeError, match="reserves more"):
        run_once(engine, [RunRequest(list(range(1000)), 1)])
    engine.close()


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_knob_is_a_key_of_the_config_and_its_loads_can_be_drawn(knob: Knob) -> None:
    for spec, value in zip(knob.make_specs("model"), knob.values, strict=True):
        options = json.loads(spec.command[-1])
        written = load_config(None, options["overrides"], {})
        section, key = knob.key.split(".")
        assert getattr(getattr(written, section), key) == value
    limit = knob.overrides.get("limits.max_total_tokens", 8192)
    for load in knob.loads:
        one, other = (load.draw(range(1000), number) for number in (0, 1))
        assert [len(request.prompt_ids) for request in one] == [len(request.prompt_ids) for request in other]
        assert all(first.prompt_ids != second.prompt_ids for first, second in zip(one, other, strict=True))
        assert max(len(request.prompt_ids) + request.max_new_tokens for request in one) <= limit
    assert {measure.load for measure in knob.measures} == {load.name for load in knob.loads}


def test_long_prompt_arrives_while_the_stream_runs() -> None:
    stream, prompt = draw_stream_and_prompt(range(1000), 0)
    assert (stream.arrival_s, len(prompt.prompt_ids)) == (0.0, 6000)
    assert prompt.arrival_s > 0


def test_guide_shows_the_figures_that_were_measured() -> None:
    text, known = GUIDE.read_text(encoding="utf-8"), json.loads((GUIDE.parent / "tuning/figures.json").read_text())
    assert list(known) == [knob.name for knob in KNOBS], "measure each knob with integration/measure/tuning/run.py"
    assert insert_tables(text, {name: KnobFigures.from_json(of_knob) for name, of_knob in known.items()}) == text
    for knob in KNOBS:
        picture = GUIDE.parent / f"tuning/{knob.name}.png"
        assert f"(tuning/{picture.name})" in text
        assert picture.read_bytes().startswith(PNG_SIGNATURE)
        assert picture.stat().st_size < MAX_PLOT_BYTES
        assert known[knob.name]["key"] == knob.key
        assert list(known[knob.name]["columns"][0]["values"]) == [name_value(value) for value in knob.values]


def test_guide_names_metrics_that_exist() -> None:
    metrics = (GUIDE.parent / "METRICS.md").read_text(encoding="utf-8")
    names = {word.strip("`*.,;:()") for word in GUIDE.read_text(encoding="utf-8").split() if "pagedkv_" in word}
    plain = {name.partition("{")[0].partition("[")[0] for name in names}
    assert len(plain) >= 10
    assert [name for name in sorted(plain) if f"`{name}`" not in metrics] == []


def test_what_others_disturb_is_run_again_and_the_least_disturbed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others_s = iter([5.0, 1.0, 3.0, 0.0])
    busy_s = 0.0

    def run(attempt: int) -> int:
        nonlocal busy_s
        busy_s += next(others_s)
        return attempt

    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(disturbance, "_busy_s", lambda: busy_s)
    monkeypatch.setattr(disturbance, "_own_s", lambda: 0.0)
    monkeypatch.setattr(disturbance.psutil, "cpu_count", lambda: 1)
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: next(clock))
    assert disturbance.run_undisturbed(run) == (1, 0.1)
    assert disturbance.run_undisturbed(run) == (0, 0.0)
