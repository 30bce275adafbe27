"""Draws the seconds of every engine on every workload."""

from __future__ import annotations

import io
from pathlib import Path
from statistics import median
from typing import Any

from pagedkv.integration.measure.benchmark.report import Report
from pagedkv.plugin.errors import ConfigError


def draw(report: Report) -> Any:
    """Makes a matplotlib figure with a panel for each workload, because their seconds can't be compared."""
    from matplotlib.figure import Figure

    names = report.engine_names()
    num_columns = min(3, len(report.workloads))
    num_rows = -(-len(report.workloads) // num_columns)
    figure = Figure(figsize=(4 * num_columns, (0.8 + 0.35 * len(names)) * num_rows + 0.4), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for (workload, of_workload), axes in zip(report.workloads.items(), panels, strict=False):
        _draw_workload(axes, workload, {name: of_workload[name].seconds for name in names if name in of_workload})
    for unused in panels:
        unused.remove()
    figure.suptitle("seconds, lower is better; dots are repetitions", fontsize=9)
    return figure


def _draw_workload(axes: Any, workload: str, seconds: dict[str, tuple[float, ...]]) -> None:
    medians = [median(values) for values in seconds.values()]
    axes.barh(list(seconds), medians, color=[f"C{index}" for index in range(len(seconds))], alpha=0.8)
    for place, (middle, values) in enumerate(zip(medians, seconds.values(), strict=True)):
        axes.plot(values, [place] * len(values), ".", color="0.2", markersize=4)
        axes.text(max(values), place, f"  {middle:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_title(workload, fontsize=10)
    axes.set_xlim(0, 1.2 * max(max(values) for values in seconds.values()))
    axes.tick_params(labelsize=8)


def save_plot(report: Report, file: Path) -> None:
    """Writes the plot. Raises ConfigError if matplotlib can't write a file of this suffix, or at this path."""
    try:
        draw(report).savefig(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"can't write the plot {file}: {error}") from error


def to_svg(report: Report) -> str:
    """Returns the plot as an SVG element, for an HTML page."""
    buffer = io.StringIO()
    draw(report).savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
