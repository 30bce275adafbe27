"""All results of a run, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.integration.measure.benchmark.machine import Machine
from pagedkv.integration.measure.benchmark.summary import Figures, Percentiles

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"
COLUMNS = (
    "workload",
    "engine",
    "seconds",
    "tokens/s",
    "TTFT p50 / p90 / p99",
    "ms a token p50 / p90 / p99",
    "longest gap",
    "peak KV",
    "waste",
    "hit rate",
    "at once",
)
LEFT_COLUMNS = ("workload", "engine")


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    started: str
    """Start time in UTC, as ISO 8601."""
    machine: Machine
    versions: Mapping[str, str]
    """Versions of this process's libraries."""
    settings: Mapping[str, Any]
    shapes: Mapping[str, str]
    """Descriptions of the requests, by workload."""
    engines: Mapping[str, Mapping[str, Any]]
    """What each engine reports about itself, by name."""
    workloads: Mapping[str, Mapping[str, Figures]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def engine_names(self) -> list[str]:
        """Names of engines, in the order of their first runs."""
        return list(dict.fromkeys(name for of_workload in self.workloads.values() for name in of_workload))

    def describe_engine(self, name: str) -> str:
        info = self.engines[name]
        details = [
            f"{key} {value}" for key, value in info.items() if key not in ("engine", "version", "kv_cache_bytes")
        ]
        return f"{name}: {info.get('engine', name)} {info.get('version', '')} ({', '.join(details)})"


def make_rows(report: Report) -> list[list[str]]:
    """Makes the cells of COLUMNS: a row for each engine on each workload."""
    return [
        [workload, engine, *_make_cells(figures)]
        for workload, of_workload in report.workloads.items()
        for engine, figures in of_workload.items()
    ]


def make_table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"{report.machine.describe()}; medians", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT_COLUMNS else "right")
    last = ""
    for row in make_rows(report):
        if last and row[0] != last:
            table.add_section()
        last = row[0]
        table.add_row(*row)
    return table


def make_seconds_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Makes a table with a column for each engine: medians in seconds, or in ms per token for one stream."""
    names = report.engine_names()
    rows = []
    for workload, of_workload in report.workloads.items():
        is_stream = workload.startswith("stream")
        unit = "ms a token" if is_stream else "s"
        cells = [_make_main_cell(of_workload.get(name), is_stream) for name in names]
        rows.append([workload, report.shapes[workload], unit, *cells])
    return ["workload", "requests × (prompt → new tokens)", "unit", *names], rows


def _make_main_cell(figures: Figures | None, is_stream: bool) -> str:
    if figures is None:
        return MISSING
    if is_stream:
        return MISSING if figures.tpot_s is None else f"{figures.tpot_s.p50 * 1000:.1f}"
    return f"{figures.median_seconds:.2f}"


def _make_cells(figures: Figures) -> list[str]:
    return [
        f"{figures.median_seconds:.2f}{_spread(figures.seconds)}",
        f"{figures.tokens_per_s:.0f}",
        _triple(figures.ttft_s, 1, 2, "s"),
        _triple(figures.tpot_s, 1000, 1, ""),
        f"{figures.longest_gap_s:.2f} s",
        MISSING if figures.peak_kv_bytes is None else f"{figures.peak_kv_bytes / 2**20:.1f} MiB",
        _percent(figures.waste),
        _percent(figures.prefix_hit_rate),
        MISSING if figures.peak_running is None else str(figures.peak_running),
    ]


def _spread(seconds: Sequence[float]) -> str:
    """Largest distance of the repetitions from their median."""
    return f" ±{(max(seconds) - min(seconds)) / 2:.2f}" if len(seconds) > 1 else ""


def _triple(percentiles: Percentiles | None, factor: float, digits: int, unit: str) -> str:
    if percentiles is None:
        return MISSING
    values = (percentiles.p50, percentiles.p90, percentiles.p99)
    return " / ".join(f"{value * factor:.{digits}f}" for value in values) + (f" {unit}" if unit else "")


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f} %"
