"""Finds a model's weights in a directory, or downloads them from the Hugging Face hub into its cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
PICKLED = ".bin"

ADAPTER_CONFIG = "adapter_config.json"

_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Suffixes of files of configuration, tokenizer and chat template."""

_TEMPLATE_FOLDER = "additional_chat_templates"

_NO_WEIGHTS = ("/", "adapter_model", "arguments", "args", "training")
"""Parts of the names of files that are not the model's weights: files in folders, of adapters, of trainers."""


def ensure_weights(
    model_id: str,
    extension: str = SAFETENSORS,
    revision: str | None = None,
    *,
    with_code: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Returns the directory of a model's weights. Downloads them if they are missing.

    Takes files of the repository's top level only: the weights that the index names (without an index, all files with
    the extension), and the files of configuration, tokenizer and chat template.

    Args:
        model_id: a directory, or a name on the hub.
        extension: of the weight files, for example ".safetensors".
        revision: of a model on the hub; None is its default.
        with_code: also download the model's Python code.
        allow_pickle: take .bin files if there are none with the extension.

    Raises:
        ConfigError: the directory has no weights, holds an adapter and no model, or the model can't be downloaded.
    """
    extensions = (extension, PICKLED) if allow_pickle else (extension,)
    if Path(model_id).is_dir():
        directory = Path(model_id)
        refuse_adapter(model_id, [path.name for path in directory.iterdir()])
    else:
        directory = _download(model_id, extensions, revision, with_code)
    weights = _find_weights(model_id, directory, extensions)
    logger.info("%d files of weights in %s", len(weights), directory)
    return directory


def refuse_adapter(model_id: str, names: Collection[str]) -> None:
    """Raises ConfigError if a repository holds an adapter and no model. `names`: its files."""
    if ADAPTER_CONFIG not in names:
        return
    if "config.json" not in names or not select_weights(names, (SAFETENSORS, PICKLED)):
        raise ConfigError(
            f"{model_id} is an adapter ({ADAPTER_CONFIG}), not a model: adapters can't be loaded or merged here; merge "
            "it into its base model (peft: merge_and_unload, then save_pretrained), and serve that directory"
        )
    logger.warning("%s is served without the adapter of %s that lies beside its weights", model_id, ADAPTER_CONFIG)


def select_weights(names: Iterable[str], extensions: Collection[str]) -> list[str]:
    """Returns the weight files with the first extension that any file has, sorted."""
    possible = sorted(name for name in names if not any(part in name for part in _NO_WEIGHTS))
    for extension in extensions:
        found = [name for name in possible if name.endswith(extension)]
        if found:
            return found
    return []


def find_model_directory(model_id: str, revision: str | None = None) -> Path | None:
    """Returns the directory, or the snapshot of a hub's model in the cache; None if neither is on this machine."""
    return Path(model_id) if Path(model_id).is_dir() else find_snapshot(model_id, revision)


def find_snapshot(model_id: str, revision: str | None = None) -> Path | None:
    """Returns the snapshot of a hub's model in the cache on this machine; None if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(model_id, name, revision=revision) for name in ("config.json", ADAPTER_CONFIG)]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _find_weights(model_id: str, directory: Path, extensions: Collection[str]) -> list[str]:
    weights = select_weights((path.name for path in directory.iterdir() if path.is_file()), extensions)
    wanted = " or ".join(f"*{extension}" for extension in extensions)
    if not weights:
        raise ConfigError(f"{model_id} has no {wanted} files; convert its weights to safetensors first")
    missing = [name for name in read_index(directory) or () if not (directory / name).is_file()]
    if missing and weights[0].endswith(SAFETENSORS):
        raise ConfigError(
            f"{model_id} lacks {', '.join(missing)}, which model{SAFETENSORS}.index.json names; download it again"
        )
    return weights


def read_index(directory: Path) -> list[str] | None:
    """Returns the files that a directory's index of safetensors names; None if there is no index.

    Raises:
        ConfigError: the index can't be read.
    """
    path = directory / f"model{SAFETENSORS}.index.json"
    if not path.is_file():
        return None
    try:
        return sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is no index of weights: {error!r}; download it again") from error


def _download(model_id: str, extensions: Collection[str], revision: str | None, with_code: bool) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        siblings = HfApi().model_info(model_id, revision=revision).siblings or []
        names = [sibling.rfilename for sibling in siblings]
        return _fetch(model_id, names, extensions, revision, with_code)
    except OfflineModeIsEnabled:
        return _find_cached(model_id, revision, "HF_HUB_OFFLINE is set")
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(f"{model_id} is no directory here, and can't be downloaded: {_first_line(error)}") from error
    except ConfigError:
        raise
    except Exception as error:  # nobody can be reached: the client's transport, and so its errors, differ by version
        return _find_cached(model_id, revision, f"{type(error).__name__}: {_first_line(error)}")


def _fetch(model_id: str, names: list[str], extensions: Collection[str], revision: str | None, with_code: bool) -> Path:
    """Downloads what is missing. Text comes first, because the index is among it."""
    from huggingface_hub import snapshot_download

    refuse_adapter(model_id, names)
    directory = Path(snapshot_download(model_id, revision=revision, allow_patterns=_select_texts(names, with_code)))
    weights = select_weights(names, extensions)
    if weights and weights[0].endswith(SAFETENSORS):
        weights = read_index(directory) or weights
    if weights:
        logger.info("fetching %s: %s", model_id, ", ".join(weights))
        snapshot_download(model_id, revision=revision, allow_patterns=weights)
    return directory


def _select_texts(names: Iterable[str], with_code: bool) -> list[str]:
    def is_wanted(name: str) -> bool:
        path = PurePosixPath(name)
        if path.suffix == ".py":
            return with_code
        return path.suffix in _TEXT_SUFFIXES and str(path.parent) in (".", _TEMPLATE_FOLDER)

    return [name for name in names if is_wanted(name)]


def _find_cached(model_id: str, revision: str | None, reason: str) -> Path:
    directory = find_snapshot(model_id, revision)
    if directory is None:
        raise ConfigError(
            f"{model_id} is no directory here, can't be downloaded ({reason}), and is not in the hub's cache"
        )
    refuse_adapter(model_id, [path.name for path in directory.iterdir()])
    logger.info("%s comes from the hub's cache: %s", model_id, reason)
    return directory


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
