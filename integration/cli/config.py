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

    keys = list_config_keys()
    if as_markdown:
        print(markdown_table(keys))
        return
    written = load_config(config, parse_settings(settings))
    if as_json:
        print(json.dumps({key.path: _value_of(written, key) for key in keys}))
    else:
        _print_table(written, keys)


def markdown_table(keys: list[ConfigKey]) -> str:
    """The keys as a Markdown table."""
    rows = [f"| `{key.path}` | `{_as_toml(key.default)}` | {key.description} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _value_of(written: Config, key: ConfigKey) -> Any:
    return reduce(getattr, key.path.split("."), written)


def _as_toml(value: Any) -> str:
    return json.dumps(int(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def _print_table(written: Config, keys: list[ConfigKey]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", "default", "meaning")
    for key in keys:
        value = _as_toml(_value_of(written, key))
        default = _as_toml(key.default)
        table.add_row(key.path, value if value == default else f"[bold]{value}[/bold]", default, key.description)
    Console().print(table)
