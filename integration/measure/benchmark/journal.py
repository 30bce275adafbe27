"""A file that records each repetition when it ends, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedkv.integration.measure.benchmark.engine_process import Repetition
from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes
from pagedkv.plugin.errors import ConfigError


class Journal:
    """A journal as lines of JSON: first the description of the run, then engines and repetitions.

    Args:
        file: created if it does not exist. None keeps the journal only in this process.
        run: everything that changes what is measured, as JSON.

    Raises:
        ConfigError: the file belongs to another run, is not a journal, or can't be read or written.
    """

    def __init__(self, file: Path | None, run: Mapping[str, Any]) -> None:
        self._file = file
        self._repetitions: dict[tuple[str, str, int], Repetition] = {}
        self.engines: dict[str, Mapping[str, Any]] = {}
        """What each engine reports about itself, by name."""
        if file is None:
            return
        if not file.exists() or not file.stat().st_size:
            self._write({"run": run})
        # Drop an incomplete last line, which a process left that ended while writing.
        whole, newline, cut_off = _read_text(file).rpartition("\n")
        first, *lines = whole.splitlines() or [""]
        if first != json.dumps({"run": run}):
            raise ConfigError(f"{file} is no journal, or of a run with other workloads, engines or settings")
        for line in lines:
            self._read(json.loads(line))
        if cut_off:
            file.write_text(whole + newline, encoding="utf-8")

    def find(self, workload: str, engine: str, number: int) -> Repetition | None:
        return self._repetitions.get((workload, engine, number))

    def add(self, workload: str, engine: str, number: int, repetition: Repetition) -> None:
        self._repetitions[workload, engine, number] = repetition
        self._write({"workload": workload, "engine": engine, "number": number, "repetition": asdict(repetition)})

    def add_engine(self, name: str, info: Mapping[str, Any]) -> None:
        """Records what an engine reports about itself. A later report is ignored."""
        if name not in self.engines:
            self.engines[name] = info
            self._write({"engine": name, "info": info})

    def _read(self, line: Mapping[str, Any]) -> None:
        if "info" in line:
            self.engines[line["engine"]] = line["info"]
            return
        values = dict(line["repetition"])
        values["requests"] = [RequestTimes(**one) for one in values["requests"]]
        self._repetitions[line["workload"], line["engine"], line["number"]] = Repetition(**values)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ConfigError(f"the journal {self._file} can't be written: {error.strerror}") from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the journal {file} can't be read: {error}") from error
