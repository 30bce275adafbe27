"""`pagedkv install-launcher-shim`: writes a `text-generation-server` for text-generation-inference's launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.integration.serve.launcher_shim import write_shim


def install_launcher_shim(
    directory: Annotated[Path, typer.Argument(help="Made where it is missing; goes first on the launcher's PATH.")],
) -> None:
    """Write a `text-generation-server` into DIRECTORY that starts pagedkv, and print its path.

    Nothing else changes: a launcher with DIRECTORY first on its PATH serves with pagedkv, without it as before.
    """
    print(write_shim(directory, sys.executable))
