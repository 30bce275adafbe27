"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedkv.plugin.errors import ConfigError

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; flags and environment variables win over it.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config, as cache.block_size=32.")
]
_MIN_TABLE_WIDTH = 150
"""Least width of printed tables. In a narrower terminal lines wrap, which reads better than cut words."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """Parses KEY=VALUE pairs into overrides for `load_config`. Raises ConfigError."""
    pairs = [setting.partition("=") for setting in settings or ()]
    for key, separator, _ in pairs:
        if not key or not separator:
            raise ConfigError(f"--set takes KEY=VALUE, as in --set cache.block_size=32; found {key!r}")
    return {key: value for key, _, value in pairs}


def make_console() -> Any:
    """Makes a console of `rich` that is wide enough for our tables."""
    from rich.console import Console

    console = Console()
    return Console(width=max(console.width, _MIN_TABLE_WIDTH))
