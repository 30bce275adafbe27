"""Makes a model's chat template visible to text-generation-inference's router.

The router reads it from chat_template.json, else from tokenizer_config.json (or the file that its flag
--tokenizer-config-path names), else from processor_config.json. It does not read chat_template.jinja, the only file
that transformers 5 writes.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

JINJA_FILE = "chat_template.jinja"
ROUTER_FILE = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ROUTER_FLAG = "--tokenizer-config-path"
_ROUTER_VARIABLE = "TOKENIZER_CONFIG_PATH"
_PROCESSOR_CONFIG = "processor_config.json"


def export_chat_template(directory: Path, output: Path | None = None) -> Path:
    """Writes the template of chat_template.jinja to a file that the router reads. Changes no existing file.

    Args:
        directory: of the model.
        output: a file to write a tokenizer configuration with the template to, for the router's
            --tokenizer-config-path; None writes chat_template.json into the directory.

    Returns:
        The file that was written; without `output`, the file that has the template already, if there is one.

    Raises:
        ConfigError: there is no template, or the file can't be written.
    """
    if output is None and (holder := find_template_of_router(directory)):
        return holder
    template = _read_jinja(directory)
    if template is None:
        raise ConfigError(f"{directory} has no {JINJA_FILE}: the model brings no chat template that could be exported")
    if output is None:
        target, values = directory / ROUTER_FILE, {"chat_template": template}
    else:
        target, values = output, {**_read_object(directory / TOKENIZER_CONFIG), "chat_template": template}
    _write_new(target, json.dumps(values, ensure_ascii=False, indent=2) + "\n")
    return target


def find_template_of_router(directory: Path) -> Path | None:
    """Returns the file in which the router finds the model's chat template; None if it finds none."""
    for name in (ROUTER_FILE, TOKENIZER_CONFIG, _PROCESSOR_CONFIG):
        values = _read_object(directory / name)
        # A processor's configuration without image_seq_len is none that the router can read.
        if values.get("chat_template") and (name != _PROCESSOR_CONFIG or "image_seq_len" in values):
            return directory / name
    return None


def has_hidden_template(directory: Path, environ: Mapping[str, str]) -> bool:
    """Whether a model has a chat template that the router does not find."""
    told = environ.get(_ROUTER_VARIABLE)
    if told and _read_object(Path(told)).get("chat_template"):
        return False
    return (directory / JINJA_FILE).is_file() and find_template_of_router(directory) is None


def warn_of_hidden_template(directory: Path, model_id: str, environ: Mapping[str, str]) -> None:
    """Logs one warning with the command to run, if the router would refuse chat."""
    if not has_hidden_template(directory, environ):
        return
    cure = f"pagedkv export-chat-template {shlex.quote(model_id)}"
    if not os.access(directory, os.W_OK):
        cure += f" --output FILE, and start the launcher with {ROUTER_FLAG} FILE"
    logger.warning(
        "chat will be refused with 'template not found': the model's %s is unknown to text-generation-inference's "
        "router; before it starts, run: %s",
        JINJA_FILE,
        cure,
    )


def _read_jinja(directory: Path) -> str | None:
    try:
        return (directory / JINJA_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {directory / JINJA_FILE}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if the file is missing or broken, which the router ignores."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already and is left as it is; move it away, or choose another file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"can't write {path}: {error.strerror}; name a file elsewhere with --output, and start the launcher with "
            f"{ROUTER_FLAG} FILE"
        ) from error
