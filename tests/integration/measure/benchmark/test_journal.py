"""Runs that are interrupted and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.integration.measure.benchmark.engine_process import EngineFailedError, EngineSpec, Repetition
from pagedkv.integration.measure.benchmark.journal import Journal
from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes
from pagedkv.integration.measure.benchmark.suite import Round, RunSettings, count_calls, run_rounds
from pagedkv.integration.measure.benchmark.workloads import select_shapes
from pagedkv.plugin.errors import ConfigError

REPETITION = Repetition(1.5, 3, 2, [RequestTimes(num_tokens=2, ttft_s=0.5, end_s=1.5)], {"waste": 0.25})
RUN = {"seed": 0, "engines": ["a"]}


def test_journal_has_what_was_written_whatever_came_after(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    journal = Journal(file, RUN)
    journal.add_engine("a", {"version": "1"})
    journal.add_engine("a", {"version": "2"})
    journal.add("short", "a", 0, REPETITION)
    with file.open("a") as cut_off:
        cut_off.write('{"workload": "short", "eng')
    again = Journal(file, RUN)
    assert again.find("short", "a", 0) == REPETITION
    assert again.find("short", "a", 1) is None
    assert again.engines == {"a": {"version": "1"}}
    again.add("short", "a", 1, REPETITION)
    assert Journal(file, RUN).find("short", "a", 1) == REPETITION


def test_journal_of_another_run_or_no_journal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    Journal(file, RUN)
    with pytest.raises(ConfigError, match="other workloads, engines or settings"):
        Journal(file, {**RUN, "seed": 1})
    notes = tmp_path / "notes"
    for text in ("buy milk", "buy milk\nand bread"):
        notes.write_text(text)
        with pytest.raises(ConfigError, match="notes is no journal"):
            Journal(notes, RUN)
        assert notes.read_text() == text
    with pytest.raises(ConfigError, match="can't be read"):
        Journal(tmp_path, RUN)


def test_run_goes_on_where_it_failed_and_engines_take_turns(
    fake_spec: Callable[[str], EngineSpec], tmp_path: Path
) -> None:
    shapes, settings = select_shapes(["short", "stream-128"]), RunSettings(range(1000), num_repetitions=2)
    well = [EngineSpec(name, fake_spec("well").command) for name in ("a", "b")]
    calls: list[tuple[str, str]] = []

    def note(engine: str, what: str) -> None:
        calls.append((engine, what))
        if calls.count(("b", "short")) == 2:
            raise EngineFailedError("pulled the plug")

    with pytest.raises(EngineFailedError):
        run_rounds([Round(shapes, well)], settings, Journal(tmp_path / "journal", RUN), note)
    assert calls[:4] == [("a", "loads"), ("b", "loads"), ("a", "warms up"), ("b", "warms up")]
    assert calls[4:8] == [("a", "short"), ("b", "short"), ("a", "stream-128"), ("b", "stream-128")]
    assert calls[8:] == [("b", "short")], "the second repetition begins with the other engine"

    calls.clear()
    journal = Journal(tmp_path / "journal", RUN)
    num_calls = count_calls([Round(shapes, well)], settings, journal)
    run_rounds([Round(shapes, well)], settings, journal, note)
    assert calls[4:] == [("b", "short"), ("a", "short"), ("b", "stream-128"), ("a", "stream-128")]
    assert len(calls) == num_calls == 8
    assert count_calls([Round(shapes, well)], settings, journal) == 0
