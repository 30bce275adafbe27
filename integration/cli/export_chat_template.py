"""The command `pagedkv export-chat-template`, which makes chat work behind text-generation-inference's router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.plugin.errors import ConfigError


def export_chat_template(
    model: Annotated[str, typer.Argument(help="Directory of the model, or its name on the Hugging Face hub.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a tokenizer configuration with the template there, for the launcher's --tokenizer-config-path, "
            "and leave the model's directory alone.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of a model that is not a directory.")] = None,
) -> None:
    """Write the model's chat_template.jinja where the router looks for it, and print the file.

    A file of its own, chat_template.json, appears beside it; no file that is there changes.
    """
    from pagedkv.integration.serve import chat_template
    from pagedkv.integration.serve.weights import find_model_directory

    directory = find_model_directory(model, revision)
    if directory is None:
        raise ConfigError(f"{model} is no directory, and not in the hub's cache; start the server once, or download it")
    print(chat_template.export_chat_template(directory, output))
