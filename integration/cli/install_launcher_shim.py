"""`pagedkv install-launcher-shim`: writes a `text-generation-server` for text-generation-inference's launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.plugin.errors import ConfigError

SHIM_NAME = "text-generation-server"
_MARK = "# made by pagedkv install-launcher-shim"

# A shell starts the interpreter, because a #! line can't hold a path with spaces, or one longer than about 120 bytes.
# To the shell the two lines below are one exec, to Python they are a string.
_SHIM = """#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
{mark}
from pagedkv.integration.serve.launcher_command import run

run()
"""


def install_launcher_shim(
    directory: Annotated[Path, typer.Argument(help="Made where it is missing; goes first on the launcher's PATH.")],
) -> None:
    """Write a `text-generation-server` into DIRECTORY that starts pagedkv, and print its path.

    Nothing else changes: a launcher with DIRECTORY first on its PATH serves with pagedkv, without it as before.
    """
    print(write_shim(directory, sys.executable))


def write_shim(directory: Path, python: str) -> Path:
    """Writes the command for an interpreter. Raises ConfigError if another program's command is in its place."""
    path = directory / SHIM_NAME
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{path} is another program's; choose a directory of its own for the shim")
    if "'" in python:
        raise ConfigError(f"the interpreter's path {python} has a quote in it; install pagedkv elsewhere")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(_SHIM.format(python=python, mark=_MARK), encoding="utf-8")
    path.chmod(0o755)
    return path
