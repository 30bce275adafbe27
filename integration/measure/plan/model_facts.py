"""Facts about a model from its configuration, also for models that pagedkv can't serve."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedkv.adapters.transformers.attention import ATTENTION_NAME
from pagedkv.adapters.transformers.checkpoint import architecture_name, build_meta_model, load_model_config
from pagedkv.adapters.transformers.description import describe_checkpoint, describe_layers
from pagedkv.adapters.transformers.probe import probe_layers
from pagedkv.integration.measure.plan.live_bytes import LiveBytes
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import ModelSettings, resolve_model_settings

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class LatentKV:
    """Multi-head latent attention (DeepSeek-V2, 2024): what a cache of the latent would keep of a token in a layer."""

    rank: int
    """Channels of the compressed keys and values."""
    rope_dim: int
    """Channels of the one rotary key that all heads share."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model without its weights."""

    spec: ModelSpec
    """Layers as pagedkv keeps their keys and values: latent ones expanded to every head."""
    modules: torch.nn.Module | None
    """Modules on the meta device; None if no model can be made from the configuration."""
    refusal: str
    """Why pagedkv can't serve it; empty if it can, as far as the configuration determines this."""
    doubt: str
    """What only loading the weights can show; empty if nothing."""
    latent: LatentKV | None
    weight_bits: int | None
    """Bits of a weight of a quantized checkpoint's projections; None if it is not quantized."""
    intermediate_size: int
    uncounted: str
    """Layers with a state other than keys and values, which is not counted; empty if there are none."""


@contextmanager
def config_directory(path: str) -> Iterator[str]:
    """Context manager: a model directory for a file that is a config.json under any name; else the path unchanged."""
    file = Path(path)
    if not file.is_file():
        yield path
    elif file.name == CONFIG_NAME:
        yield str(file.parent)
    else:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG_NAME).write_bytes(file.read_bytes())
            yield folder


def read_model(config: Config) -> ModelFacts:
    """Reads what `model.path` names: a directory with a config.json, or the name of a model in the local cache.

    Raises:
        ConfigError: there is no such model.
        UnsupportedError: the configuration has no attention layers, so there is nothing to plan.
    """
    settings = resolve_model_settings(config)
    model_config = load_model_config(settings)
    text_config = model_config.get_text_config(decoder=True)
    refusal = doubt = ""
    modules = None
    try:
        spec = describe_checkpoint(settings)
        modules = build_meta_model(model_config, settings, ATTENTION_NAME).eval()
    except UnsupportedError as error:
        refusal = str(error)
        spec = _describe_refused(model_config, text_config, refusal)
    else:
        spec, refusal, doubt = _probe(modules, spec)
    if modules is None:
        modules = _build_anyway(text_config, settings)
    return ModelFacts(
        spec,
        modules,
        refusal,
        doubt,
        _find_latent(text_config),
        _weight_bits(model_config),
        getattr(text_config, "intermediate_size", None) or 4 * spec.hidden_size,
        ", ".join(sorted(_stateful_types(text_config))),
    )


def _probe(modules: torch.nn.Module, spec: ModelSpec) -> tuple[ModelSpec, str, str]:
    """Returns the spec from the layers' calls, why they can't be served, and what the meta device can't show."""
    try:
        with torch.inference_mode(), LiveBytes("meta"):
            return probe_layers(modules, spec), "", ""
    except UnsupportedError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return spec, "", "whether its layers can be served is seen at load: it computes what needs real tensors"
        return spec, str(error), ""


def _describe_refused(model_config: Any, text_config: Any, refusal: str) -> ModelSpec:
    try:
        layers = describe_layers(text_config)
        stateful = _stateful_types(text_config)
        types = getattr(text_config, "layer_types", None) or [""] * len(layers)
        dtype = getattr(text_config, "dtype", None) or getattr(model_config, "dtype", None) or torch.float32
        return ModelSpec(
            architecture=architecture_name(model_config),
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            layers=tuple(layer for layer, kind in zip(layers, types, strict=True) if kind not in stateful),
            vocab_size=text_config.vocab_size,
            hidden_size=text_config.hidden_size,
            max_position_tokens=int(getattr(text_config, "max_position_embeddings", None) or 0) or 2048,
            eos_token_ids=(),
            bos_token_id=None,
            pad_token_id=None,
        )
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(f"{refusal}; and its configuration says nothing of attention heads") from error


def _build_anyway(text_config: Any, settings: ModelSettings) -> torch.nn.Module | None:
    try:
        return build_meta_model(text_config, settings).eval()
    except UnsupportedError:
        return None


def _find_latent(text_config: Any) -> LatentKV | None:
    rank = getattr(text_config, "kv_lora_rank", None)
    return None if rank is None else LatentKV(int(rank), int(text_config.qk_rope_head_dim))


def _stateful_types(text_config: Any) -> set[str]:
    types = set(getattr(text_config, "layer_types", None) or ())
    return {kind for kind in types if "attention" not in kind or "linear" in kind}


def _weight_bits(model_config: Any) -> int | None:
    quantization = getattr(model_config, "quantization_config", None)
    if quantization is None:
        return None
    stated = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(stated.get("quant_method"))
    groups = (stated.get("config_groups") or {}).values()
    numbers = [stated.get("bits"), *((group.get("weights") or {}).get("num_bits") for group in groups)]
    if stated.get("load_in_4bit") or "fp4" in method:
        numbers.append(4)
    if stated.get("load_in_8bit") or "fp8" in method:
        numbers.append(8)
    return next((int(number) for number in numbers if number), None)
