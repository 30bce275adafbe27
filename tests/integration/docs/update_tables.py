"""Writes the generated tables of integration/docs. `--check` only compares and names outdated pages.

A table is between `<!-- generated: NAME -->` and `<!-- end -->`. The installed pagedkv is the source of its content.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from pagedkv.integration.cli import config
from pagedkv.integration.cli.main import app
from pagedkv.integration.serve import launcher_variables
from pagedkv.integration.serve.metrics import catalogue
from pagedkv.plugin.config import list_config_keys
from pagedkv.plugin.registry import GROUPS

DOCS = Path(__file__).resolve().parents[3] / "integration" / "docs"


def list_commands() -> str:
    """Every command of `pagedkv` with its options, from its own help."""
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return "\n\n".join(_describe_command(name, command) for name, command in commands.items())


def list_groups() -> str:
    """A table of the entry-point groups and the interfaces of their plugins."""
    rows = [f"| `{group.name}` | `{group.interface.__module__}.{group.interface.__name__}` |" for group in GROUPS]
    return "\n".join(["| entry-point group | interface |", "|---|---|", *rows])


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "config": ("CONFIG.md", lambda: config.markdown_table(list_config_keys())),
    "metrics": ("METRICS.md", catalogue.markdown_table),
    "commands": ("CLI.md", list_commands),
    "groups": ("PLUGINS.md", list_groups),
    "variables": ("DROP_IN.md", launcher_variables.markdown_table),
}
"""By name: the page that has the table, and the function that makes it."""


def update(page: str, name: str, table: str) -> str:
    """Returns the page with this content of a table. Raises ValueError if the page has no place for it."""
    pattern = rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)"
    if len(re.findall(pattern, page, flags=re.DOTALL)) != 1:
        raise ValueError(f"the page has no single place for {name}: <!-- generated: {name} --> … <!-- end -->")
    return re.sub(pattern, lambda found: f"{found[1]}{table}{found[2]}", page, flags=re.DOTALL)


def find_outdated() -> dict[Path, str]:
    """Returns the new text of each page that differs from what the tables' sources give."""
    pages: dict[Path, str] = {}
    for name, (file, make) in TABLES.items():
        path = DOCS / file
        pages[path] = update(pages.get(path) or path.read_text(encoding="utf-8"), name, make())
    return {path: text for path, text in pages.items() if text != path.read_text(encoding="utf-8")}


def _describe_command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    names = [each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments]
    rows = [f"| `{each.name.upper()}` | | {_cell(each.help)} |" for each in arguments]
    rows += [
        f"| {', '.join(f'`{text}`' for text in each.opts)}{_value_name(each)} | {_default(each)} | {_cell(each.help)} |"
        for each in options
        if not each.hidden
    ]
    table = ["", "| option | default | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"### `{' '.join(['pagedkv', name, *names])}`", "", command.help, *table])


def _value_name(option: Any) -> str:
    return f" {_cell(option.metavar)}" if option.metavar else ""


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.is_flag or option.default in (None, "") else f"`{option.default}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def main() -> int:
    """Writes outdated pages, or names them with `--check`. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes the generated tables of integration/docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is outdated")
    is_check = parser.parse_args().check
    outdated = find_outdated()
    for path, text in outdated.items():
        print(f"{'outdated' if is_check else 'written'}: {path.name}")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
