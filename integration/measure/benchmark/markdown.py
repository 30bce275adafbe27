"""Formats the tables of a run in Markdown, for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.integration.measure.benchmark.report import COLUMNS, LEFT_COLUMNS, Report, make_rows, make_seconds_rows


def to_markdown(report: Report) -> str:
    heading, seconds_rows = make_seconds_rows(report)
    is_left = [True, True, True] + [False] * (len(heading) - 3)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return "\n".join(
        [
            f"`pagedkv bench`, {report.started}, {_say_settings(report)}. {report.machine.describe()}; {versions}.",
            "",
            *_table(heading, is_left, seconds_rows),
            "",
            *_table(COLUMNS, [column in LEFT_COLUMNS for column in COLUMNS], make_rows(report)),
            "",
            *(f"- {report.describe_engine(name)}" for name in report.engine_names()),
            "",
        ]
    )


def _say_settings(report: Report) -> str:
    settings = report.settings
    return (
        f"medians of {settings['repetitions']} alternating repetitions, seed {settings['seed']}, "
        f"requests {settings['arrivals']}, model {report.model}"
    )


def _table(heading: Sequence[str], is_left: Sequence[bool], rows: Iterable[Sequence[str]]) -> list[str]:
    # A "|" inside a cell would end it.
    lines = [heading, ["---" if left else "--:" for left in is_left], *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
