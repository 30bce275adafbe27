"""Spreads tests over the workers of pytest-xdist: what takes longest starts first, what shares fixtures stays together.

Work is handed out in units. A unit is a test file, unless `tests/durations.json` names a folder around it
("tests/x/", whose files share an expensive fixture), a part of it ("tests/x/test_y.py::test_z") or each of its tests
("tests/x/test_y.py::*"), where a long file's tests share none. The file says how many seconds each unit took;
`--record-durations` writes it anew.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

DURATIONS_FILE = Path(__file__).parents[1] / "durations.json"
ROOT = DURATIONS_FILE.parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write to tests/durations.json how long the tests took; meant for whole runs on an idle machine",
    )


class Units:
    """How tests are bundled, and how long each bundle is expected to take."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @classmethod
    def read(cls) -> Units:
        return cls(json.loads(DURATIONS_FILE.read_text()) if DURATIONS_FILE.exists() else {})

    def entry_of(self, nodeid: str) -> str:
        """The narrowest name in the durations that the test lies in; its file's where there is none."""
        file = nodeid.partition("::")[0]
        return next((name for name in _names_around(nodeid) if name in self.seconds), file)

    def name_of(self, nodeid: str) -> str:
        entry = self.entry_of(nodeid)
        return nodeid if entry.endswith("::*") else entry

    def expected_s(self, unit: str) -> float:
        """A unit that was never timed may be long: it starts first."""
        return self.seconds.get(self.entry_of(unit), float("inf"))


def _names_around(nodeid: str) -> Iterator[str]:
    """From the test itself outwards: its function, its class, its file, the folders around."""
    yield nodeid
    name = nodeid.partition("[")[0]
    while "::" in name:
        yield name
        name = name.rpartition("::")[0]
    yield f"{name}::*"
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield f"{name}/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """In place of xdist's own `--dist load`, which `-n` alone chooses."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    units = Units.read()

    class LongestFirstScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return units.name_of(nodeid)

        def _assign_work_unit(self, node: object) -> None:
            longest_first = sorted(self.workqueue.items(), key=lambda unit: -units.expected_s(unit[0]))
            self.workqueue = OrderedDict(longest_first)
            super()._assign_work_unit(node)

    return LongestFirstScheduling(config, log)


class _Recorder:
    """Sums up the seconds of each unit, fixtures included, and writes them when all tests have run."""

    def __init__(self) -> None:
        self._units = Units.read()
        self._by_unit: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_unit[self._units.name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = dict(self._units.seconds)
        by_entry: defaultdict[str, list[float]] = defaultdict(list)
        for unit, unit_s in self._by_unit.items():
            by_entry[self._units.entry_of(unit)].append(unit_s)
        seconds.update({entry: mean(units_s) for entry, units_s in by_entry.items()})
        there = [unit for unit in seconds if (ROOT / unit.partition("::")[0]).exists()]
        rounded = {unit: round(seconds[unit], 1) for unit in there}
        longest_first = dict(sorted(rounded.items(), key=lambda unit: (-unit[1], unit[0])))
        DURATIONS_FILE.write_text(json.dumps(longest_first, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "durations-recorder")
