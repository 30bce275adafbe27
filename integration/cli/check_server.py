"""The command `pagedkv check-server`, a start check for images and probes."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer

from pagedkv.plugin.errors import UnavailableError

EXIT_UNAVAILABLE = 1
LAUNCHER_TARGET = "unix:/tmp/text-generation-server-0"
"""The first shard of a launcher without --shard-uds-path."""


def check_server(
    target: Annotated[
        str, typer.Argument(metavar="ADDR", help="The server: HOST:PORT, unix:PATH, or a socket's path.")
    ] = LAUNCHER_TARGET,
    command: Annotated[
        bool,
        typer.Option("--command", help="Check which text-generation-server a launcher would start, before it starts."),
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for the answer.")] = 5.0,
) -> None:
    """Check that the server at ADDR is pagedkv. Exit code 0 is yes, 1 nobody answers, 2 another server does."""
    from pagedkv.integration.serve.launcher_shim import require_shim
    from pagedkv.integration.serve.server_check import check_server

    if command:
        print(require_shim(os.environ))
        return
    try:
        print(f"pagedkv, attention {asyncio.run(check_server(target, timeout_s))}")
    except UnavailableError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_UNAVAILABLE) from None
