"""Loads a checkpoint with transformers: configuration, tokenizer, weights. Without network and progress bars.

A model is a directory, or a name whose files are already in the local Hugging Face cache.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from pagedkv.plugin.errors import ConfigError, UnsupportedError
from pagedkv.plugin.resolved_config import ModelSettings

logger = logging.getLogger(__name__)

# transformers has no types for these
_from_config: Any = AutoModelForCausalLM.from_config
_logging: Any = transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off progress bars and warnings of transformers, and restores its settings afterwards.

    Does nothing at log level DEBUG.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    verbosity, had_progress_bar = _logging.get_verbosity(), _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.set_verbosity(verbosity)
        if had_progress_bar:
            _logging.enable_progress_bar()


def load_model_config(settings: ModelSettings) -> Any:
    """Loads the checkpoint's `config.json` as a transformers configuration.

    Raises:
        ConfigError: the checkpoint does not exist here, or its configuration can't be read.
        UnsupportedError: this version of transformers does not know the model, or the model needs its own code.
    """
    directory = Path(settings.path)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ConfigError(f"the directory {directory} has no config.json; give the directory of a model")
    with _explained(settings, "configuration"), quiet_transformers():
        return AutoConfig.from_pretrained(settings.path, **_location(settings))


def load_generation_config(settings: ModelSettings) -> GenerationConfig | None:
    """Loads the checkpoint's `generation_config.json`; None if it has none."""
    with quiet_transformers():
        try:
            return GenerationConfig.from_pretrained(settings.path, revision=_revision(settings), local_files_only=True)
        except OSError:
            return None


def load_pretrained_tokenizer(settings: ModelSettings) -> Any:
    """Loads the tokenizer. Raises ConfigError if the checkpoint has none."""
    with _explained(settings, "tokenizer"), quiet_transformers():
        return AutoTokenizer.from_pretrained(settings.path, **_location(settings))


def load_causal_model(
    settings: ModelSettings,
    model_config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None,
    split: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Loads the model with its weights, in evaluation mode. On a GPU and for shards this needs accelerate.

    Args:
        attn_implementation: name of an attention function of transformers; None lets it choose.
        split: arguments from `plan_split`, for a shard of the model; its device is then the process's.

    Raises:
        ConfigError: no safetensors weights (and pickled ones are not allowed), or weights that lack parameters.
            Or accelerate is needed and not installed.
        UnsupportedError: the architecture refuses the attention function.
    """
    placement = _place(device) if split is None else split
    if placement:
        _require_accelerate(device)
    with (
        _explained(settings, "weights"),
        _own_attention_named(architecture_name(model_config), attn_implementation),
        quiet_transformers(),
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            settings.path,
            config=model_config,
            dtype=dtype,
            **placement,
            attn_implementation=attn_implementation,
            use_safetensors=None if settings.allow_pickle else True,
            output_loading_info=True,
            **_location(settings),
        )
    model: torch.nn.Module
    model, report = loaded
    # transformers initializes missing weights at random and only warns
    faults = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if faults:
        raise ConfigError(
            f"the weights of {settings.path} do not fit its config.json: {_abridge(faults)} missing or of another "
            "shape; download the model again"
        )
    return model.eval()


def _place(device: torch.device) -> dict[str, Any]:
    """Arguments that load weights straight to a device; none for the CPU, where they are loaded anyway."""
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _require_accelerate(device: torch.device) -> None:
    if importlib.util.find_spec("accelerate") is None:
        extra = "shards" if device.type == "cpu" else "gpu"
        raise ConfigError(
            f'transformers loads this model with accelerate, which is not installed: pip install "pagedkv[{extra}]"'
        )


def build_meta_model(
    model_config: Any, settings: ModelSettings, attn_implementation: str | None = None
) -> torch.nn.Module:
    """Builds the model's modules on the meta device: shapes without memory.

    Args:
        attn_implementation: name of an attention function of transformers; None lets it choose.

    Raises:
        UnsupportedError: the configuration does not make a model.
    """
    name = architecture_name(model_config)
    try:
        with torch.device("meta"), quiet_transformers():
            model: torch.nn.Module = _from_config(
                model_config,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=attn_implementation,
            )
    except Exception as error:  # the model's own code may run here
        raise UnsupportedError(f"{name} can't be built from its config.json: {error}") from error
    return model


def architecture_name(model_config: Any) -> str:
    return next(iter(model_config.architectures or ()), type(model_config).__name__.removesuffix("Config"))


def _location(settings: ModelSettings) -> dict[str, Any]:
    return {
        "revision": _revision(settings),
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
    }


def _revision(settings: ModelSettings) -> str:
    return settings.revision or "main"


@contextmanager
def _explained(settings: ModelSettings, part: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(_explain_missing(settings, part, error)) from error
    except (ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedError(
                f"{settings.path} runs Python code of its own; set model.trust_remote_code if you trust its author"
            ) from error
        kind = ConfigError if part == "tokenizer" else UnsupportedError
        raise kind(f"transformers can't load the {part} of {settings.path}: {_first_line(error)}") from error


@contextmanager
def _own_attention_named(architecture: str, attn_implementation: str | None) -> Iterator[None]:
    """Turns the error of an architecture whose table of attention classes lacks our function into UnsupportedError."""
    try:
        yield
    except KeyError as error:
        if error.args != (attn_implementation,):
            raise
        raise UnsupportedError(
            f"{architecture} has attention of its own, which does not go through transformers' attention interface"
        ) from error


def _explain_missing(settings: ModelSettings, part: str, error: OSError) -> str:
    if part == "weights" and not settings.allow_pickle:
        return (
            f"{settings.path} has no safetensors weights ({_first_line(error)}); convert them, or set "
            "model.allow_pickle if you trust their author: unpickling runs code"
        )
    if Path(settings.path).is_dir():
        return f"the directory {settings.path} holds no readable {part} of a model: {_first_line(error)}"
    return (
        f"there is no model at {settings.path}: no such directory, and no model of this name in the local Hugging Face "
        "cache; give the directory that holds config.json, tokenizer and safetensors, or download it first "
        "(hf download NAME)"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _abridge(names: list[str], max_shown: int = 5) -> str:
    more = f" and {len(names) - max_shown} more" if len(names) > max_shown else ""
    return ", ".join(names[:max_shown]) + more
