"""Writes a run as one self-contained HTML page: tables, plot, and all figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from pagedkv.integration.measure.benchmark.plot import to_svg
from pagedkv.integration.measure.benchmark.report import COLUMNS, LEFT_COLUMNS, Report, make_rows, make_seconds_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
.left { text-align: left; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 12px; }
"""


def to_html(report: Report) -> str:
    heading, seconds_rows = make_seconds_rows(report)
    settings = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in report.settings.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    engines = "".join(f"<li>{escape(report.describe_engine(name))}</li>" for name in report.engine_names())
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>pagedkv bench, {escape(report.started)}</title><style>{_STYLE}</style></head>
<body>
<h1>pagedkv bench</h1>
<p>{escape(report.started)}, model {escape(report.model)}; {escape(settings)}.<br>
{escape(report.machine.describe())}; {escape(versions)}.</p>
<h2>Medians</h2>
{_table(heading, heading[:3], seconds_rows)}
{to_svg(report)}
<h2>All figures</h2>
{_table(COLUMNS, LEFT_COLUMNS, make_rows(report))}
<h2>Engines</h2>
<ul>{engines}</ul>
<details><summary>As JSON</summary><pre>{escape(json.dumps(report.to_json(), indent=1))}</pre></details>
</body>
</html>
"""


def _table(heading: Sequence[str], left: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    classes = [' class="left"' if column in left else "" for column in heading]
    head = "".join(f"<th{class_}>{escape(column)}</th>" for class_, column in zip(classes, heading, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{class_}>{escape(cell)}</td>" for class_, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
