"""`pagedkv config`: lists every key with its value and meaning."""

from __future__ import annotations

import json
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, parse_settings

if TYPE_CHECKING:
    from pagedkv.plugin.config import Config, ConfigKey


def config(
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of keys and defaults.")] = False,
) -> None:
    """Check the config, and show each key with its value from file, environment and flags."""
    from pagedkv.plugin.config import list_config_keys, load_config
    from pagedkv.plugin.plugin_keys import list_plugin_keys

    keys = list_config_keys()
    if as_markdown:
        print(markdown_table(keys))
        return
    written = load_config(config, parse_settings(settings))
    rows = [(key.path, _value_of(written, key), key.default, key.description) for key in keys]
    rows += [(key.path, key.value, key.default, key.description) for key in list_plugin_keys(written)]
    if as_json:
        print(json.dumps({path: value for path, value, _, _ in rows}, default=str))
    else:
        _print_table(rows)


def markdown_table(keys: list[ConfigKey]) -> str:
    """The keys as a Markdown table."""
    rows = [f"| `{key.path}` | `{_as_toml(key.default)}` | {key.description} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _value_of(written: Config, key: ConfigKey) -> Any:
    return reduce(getattr, key.path.split("."), written)


def _as_toml(value: Any) -> str:
    return json.dumps(int(value) if isinstance(value, int) and not isinstance(value, bool) else value, default=str)


def _print_table(rows: list[tuple[str, Any, Any, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", "default", "meaning")
    for path, value, default, description in rows:
        shown, usual = _as_toml(value), _as_toml(default)
        table.add_row(path, shown if shown == usual else f"[bold]{shown}[/bold]", usual, description)
    Console().print(table)
