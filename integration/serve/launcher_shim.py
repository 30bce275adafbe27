"""Writes and finds the `text-generation-server` that starts pagedkv for text-generation-inference's launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

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


def write_shim(directory: Path, python: str) -> Path:
    """Writes the command for an interpreter. Raises ConfigError if another program's command is in its place."""
    path = directory / SHIM_NAME
    if path.exists() and not _is_shim(path):
        raise ConfigError(f"{path} is another program's; choose a directory of its own for the shim")
    if "'" in python:
        raise ConfigError(f"the interpreter's path {python} has a quote in it; install pagedkv elsewhere")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(_SHIM.format(python=python, mark=_MARK), encoding="utf-8")
    path.chmod(0o755)
    return path


def require_shim(environ: Mapping[str, str]) -> Path:
    """Returns the shim, if it is the `text-generation-server` that a launcher with this environment starts.

    Raises:
        ConfigError: the command is missing from the PATH, or is another server's.
    """
    found = shutil.which(SHIM_NAME, path=environ.get("PATH", os.defpath))
    if found is None:
        raise ConfigError(f"no {SHIM_NAME} is on PATH; put the folder of pagedkv install-launcher-shim first on it")
    if not _is_shim(Path(found)):
        raise ConfigError(
            f"{found} is the {SHIM_NAME} that a launcher would start, and is not pagedkv's; put the folder of pagedkv "
            "install-launcher-shim before its folder on PATH"
        )
    return Path(found)


def _is_shim(path: Path) -> bool:
    return _MARK in path.read_text(encoding="utf-8", errors="replace")
