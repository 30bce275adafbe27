"""Writes the figures of the tuning runs as tables of TUNING.md and as plots."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pagedkv.integration.measure.benchmark.engine_process import Repetition
from pagedkv.integration.measure.tuning.knobs import Knob, name_value

_PANEL_INCHES = (2.4, 2.1)
_MAX_COLUMNS = 4
_DOTS_PER_INCH = 80


@dataclass(frozen=True, slots=True)
class Column:
    load: str
    label: str
    digits: int
    values: Mapping[str, Sequence[float]]
    """Figures by the knob's value, one for each repetition."""


@dataclass(frozen=True, slots=True)
class KnobFigures:
    """All figures of one knob, for its table and its plot."""

    key: str
    loads: Mapping[str, str]
    """Descriptions of the requests, by load."""
    columns: Sequence[Column]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> KnobFigures:
        return cls(read["key"], read["loads"], [Column(**column) for column in read["columns"]])


def read_figures(knob: Knob, repetitions: Mapping[tuple[str, str], Sequence[Repetition]]) -> KnobFigures:
    """Reads a knob's figures from `repetitions`, which are by load and value."""
    names = [name_value(value) for value in knob.values]
    columns = [
        Column(
            measure.load,
            measure.label,
            measure.digits,
            # Keep two digits more than are shown.
            {
                name: [round(measure.read(one), measure.digits + 2) for one in repetitions[measure.load, name]]
                for name in names
            },
        )
        for measure in knob.measures
    ]
    return KnobFigures(knob.key, {load.name: load.description for load in knob.loads}, columns)


def to_table(figures: KnobFigures) -> list[str]:
    """Returns lines of Markdown: a row for each value, with medians and the largest distance from them."""
    loads = [f"{name}: {description}" for name, description in figures.loads.items()]
    heading = [f"`{figures.key}`", *(f"{column.load}: {column.label}" for column in figures.columns)]
    rows = [
        [f"`{name}`", *(_cell(column.values[name], column.digits) for column in figures.columns)]
        for name in figures.columns[0].values
    ]
    lines = [heading, ["---"] + ["--:"] * len(figures.columns), *rows]
    return [*("- " + load for load in loads), "", *("| " + " | ".join(line) + " |" for line in lines)]


def _cell(values: Sequence[float], digits: int) -> str:
    spread = (max(values) - min(values)) / 2
    # Omit a spread that would be shown as zero.
    shown = f" ±{spread:.{digits}f}" if spread >= 0.5 * 10**-digits else ""
    return f"{median(values):.{digits}f}{shown}"


def insert_tables(guide: str, figures: Mapping[str, KnobFigures]) -> str:
    """Returns the guide with each table in its place, `<!-- measured: NAME -->` to `<!-- end -->`.

    Raises:
        ValueError: the guide has no place for a knob.
    """
    for name, of_knob in figures.items():
        place = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(guide):
            raise ValueError(f"the guide has no <!-- measured: {name} --> … <!-- end -->")
        table = "\n".join(to_table(of_knob))
        guide = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", guide)  # type: ignore[misc]
    return guide


def save_plot(figures: KnobFigures, file: Path) -> None:
    """Draws a PNG with a panel for each column: medians as a line, repetitions as dots."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    num_columns = min(_MAX_COLUMNS, len(figures.columns))
    num_rows = math.ceil(len(figures.columns) / num_columns)
    with mpl.rc_context({"font.size": 8}):
        size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows)
        figure = Figure(figsize=size, layout="constrained")
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for column, axes in zip(figures.columns, panels, strict=False):
            _draw_column(axes, column)
            axes.set_xlabel(figures.key)
        for unused in panels[len(figures.columns) :]:
            unused.remove()
        figure.savefig(file, dpi=_DOTS_PER_INCH)


def _draw_column(axes: Any, column: Column) -> None:
    places = range(len(column.values))
    axes.plot(places, [median(values) for values in column.values.values()], "o-", markersize=4)
    for place, values in zip(places, column.values.values(), strict=True):
        axes.plot([place] * len(values), values, ".", color="0.3", markersize=3)
    axes.set_xticks(places, list(column.values))
    axes.set_ylim(0, 1.15 * max(max(values) for values in column.values.values()) or 1)
    axes.set_title(f"{column.load}: {column.label}", fontsize=8)
    axes.grid(axis="y", color="0.9")
