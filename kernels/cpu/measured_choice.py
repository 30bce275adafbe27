"""Times candidates for the same work on this machine, once: the figures are kept on disk for the next process.

Figures are kept by machine (CPU, threads, torch, the kernels' sources) and by a key of the work, a file each, in the
user's cache directory. A file that can't be read, or is about something else, is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pagedkv.kernels.cpu.compiler import cache_dir, cpu_description, hash_sources

logger = logging.getLogger(__name__)

Work = Callable[[], object]
Seconds = dict[str, float]
"""Of each candidate, the shortest of its runs."""

_MAX_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class TimingTable:
    """What candidates took, in seconds, for each case of some work."""

    title: str
    """What the work is, its sizes and the number of threads included."""
    cases: dict[str, Seconds]
    """By case, such as "decode of 1024 tokens"."""

    def __str__(self) -> str:
        """A line for the title and one for each case, in milliseconds; the fastest candidate is marked."""
        lines = [self.title]
        for case, seconds in self.cases.items():
            fastest = min(seconds, key=lambda name: seconds[name])
            figures = (f"{name} {1e3 * value:.3f}{'*' if name == fastest else ''}" for name, value in seconds.items())
            lines.append(f"  {case}: {', '.join(figures)} ms")
        return "\n".join(lines)

    def mean_ratio(self, candidate: str, other: str) -> float:
        """How many times as long `candidate` takes as `other`: the geometric mean over the cases that have both."""
        both = [seconds for seconds in self.cases.values() if candidate in seconds and other in seconds]
        return math.exp(math.fsum(math.log(seconds[candidate] / seconds[other]) for seconds in both) / len(both))


def time_candidates(candidates: Mapping[str, Work], max_s: float) -> Seconds:
    """Runs the candidates by turns, after one run each that is not counted, until `max_s` is used up.

    Every candidate is run and counted at least once, so work that takes long takes longer than `max_s`.
    """
    end = time.perf_counter() + max_s
    shortest = dict.fromkeys(candidates, math.inf)
    for run in candidates.values():
        run()
    for _ in range(_MAX_ROUNDS):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - start)
        if time.perf_counter() >= end:
            break
    return shortest


def measured_table(title: str, measure: Callable[[], Mapping[str, Seconds]]) -> TimingTable:
    """Returns the table of that title and torch's number of threads: the one kept for this machine, or else a new one,
    which is kept and logged."""
    title = f"{title}, on {torch.get_num_threads()} threads"
    path = _path_of(title)
    table = _read(path)
    if table is None or table.title != title:
        start = time.perf_counter()
        table = TimingTable(title, dict(measure()))
        logger.info("measured in %.2f s: %s", time.perf_counter() - start, table)
        _write(path, table)
    return table


def kept_tables() -> list[TimingTable]:
    """All tables that are kept for this machine, by title."""
    tables = [_read(path) for path in _folder().glob(f"{_machine()}-*.json")]
    return sorted((table for table in tables if table is not None), key=lambda table: table.title)


def _path_of(title: str) -> Path:
    return _folder() / f"{_machine()}-{hashlib.sha256(title.encode()).hexdigest()[:24]}.json"


def _folder() -> Path:
    folder = cache_dir() / "timings"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _machine() -> str:
    """Hashes all that figures depend on besides the work."""
    parts = (platform.machine(), cpu_description(), torch.__version__, hash_sources())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> TimingTable | None:
    try:
        content = json.loads(path.read_text())
        cases = {
            str(case): {str(name): float(seconds) for name, seconds in candidates.items()}
            for case, candidates in content["cases"].items()
        }
        are_times = all(0 < seconds < math.inf for case in cases.values() for seconds in case.values())
        return TimingTable(str(content["title"]), cases) if cases and all(cases.values()) and are_times else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("measuring again, since %s can't be read: %s", path, error)
        return None


def _write(path: Path, table: TimingTable) -> None:
    """Writes next to the file, then renames: another process never sees half of it."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            part.write_text(json.dumps(asdict(table)))
            os.replace(part, path)
    except OSError as error:
        logger.warning("figures are not kept for the next start: %s", error)
