"""Finds a model's weights in a directory, or downloads them from the Hugging Face hub into its cache."""

from __future__ import annotations

import logging
from pathlib import Path

from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of configuration, tokenizer and chat template."""


def ensure_weights(model_id: str, extension: str, revision: str | None = None, *, with_code: bool = False) -> Path:
    """Returns the directory of a model's weights. Downloads them if they are missing.

    Args:
        model_id: a directory, or a name on the hub.
        extension: of the weight files, for example ".safetensors".
        revision: of a model on the hub; None is its default.
        with_code: also download the model's Python code.

    Raises:
        ConfigError: a directory without weights, or a model that can't be downloaded.
    """
    is_directory = Path(model_id).is_dir()
    directory = Path(model_id) if is_directory else _download(model_id, extension, revision, with_code)
    weights = sorted(directory.glob(f"*{extension}"))
    if not weights:
        raise ConfigError(f"{model_id} has no *{extension} files; convert its weights to safetensors first")
    logger.info("%d files of weights in %s", len(weights), directory)
    return directory


def _download(model_id: str, extension: str, revision: str | None, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{extension}", *_TEXT_FILES, *(["*.py"] if with_code else [])]
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model_id} is no directory here, and can't be downloaded: {reason}") from error
