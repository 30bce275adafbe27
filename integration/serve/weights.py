"""Weights on this machine: found in a directory, or fetched from the Hugging Face hub into its cache."""

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
"""Of configuration, tokenizer and chat template."""

_TEMPLATE_FOLDER = "additional_chat_templates"

_NO_WEIGHTS = ("/", "adapter_model", "arguments", "args", "training")
"""In the names of files with such an extension that are none of the model: in folders, of adapters, of trainers."""


def ensure_weights(
    model_id: str,
    extension: str = SAFETENSORS,
    revision: str | None = None,
    *,
    with_code: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """The directory that holds a model's weights, which are downloaded where they are missing.

    Taken are files of the repository's first level: those with weights, which the index names where there is one; and
    those of configuration, tokenizer and chat template.

    Args:
        model_id: a directory, or a name on the hub.
        extension: of the files with the weights, as ".safetensors".
        revision: of a model on the hub; None is its default.
        with_code: download the Python code that the model brings, too.
        allow_pickle: take .bin files where there are none with the extension.

    Raises:
        ConfigError: a directory without weights, an adapter without a model, or a model that can't be downloaded.
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
    """Raises ConfigError where the files of a repository are an adapter's and no model's."""
    if ADAPTER_CONFIG not in names:
        return
    if "config.json" not in names or not select_weights(names, (SAFETENSORS, PICKLED)):
        raise ConfigError(
            f"{model_id} is an adapter ({ADAPTER_CONFIG}), not a model: adapters can't be loaded or merged here; merge "
            "it into its base model (peft: merge_and_unload, then save_pretrained), and serve that directory"
        )
    logger.warning("%s is served without the adapter of %s that lies beside its weights", model_id, ADAPTER_CONFIG)


def select_weights(names: Iterable[str], extensions: Collection[str]) -> list[str]:
    """The files of the first extension that has any, in order; `_NO_WEIGHTS` says which are none."""
    possible = sorted(name for name in names if not any(part in name for part in _NO_WEIGHTS))
    for extension in extensions:
        found = [name for name in possible if name.endswith(extension)]
        if found:
            return found
    return []


def find_model_directory(model_id: str, revision: str | None = None) -> Path | None:
    """A directory itself, or a hub's model in the cache; None where neither is here."""
    return Path(model_id) if Path(model_id).is_dir() else find_snapshot(model_id, revision)


def find_snapshot(model_id: str, revision: str | None = None) -> Path | None:
    """The directory of a hub's model in the hub's cache on this machine; None where it is not there."""
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
    """The files that a directory's index of safetensors names; None where there is no index.

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
    """Downloads what is missing. Text first: it has the index."""
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
