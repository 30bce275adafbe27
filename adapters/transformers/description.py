"""Describes a model from its configuration, without weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.resolved_config import ModelSettings

from .checkpoint import architecture_name, build_meta_model, load_generation_config, load_model_config
from .kv_scales import describe_kv_scales
from .rope import find_fixed_positions
from .weight_files import read_stored_dtype

logger = logging.getLogger(__name__)

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OTHER_MODALITIES = ("vision_config", "audio_config", "image_config", "speech_config")
_QK_NORM = re.compile(r"\.(q|query|k|key)_?(layer)?norm\w*$")


def describe_checkpoint(settings: ModelSettings) -> ModelSpec:
    """Reads config.json and generation_config.json, and builds the model on the meta device to count its parameters.

    Raises:
        ConfigError: the checkpoint does not exist.
        UnsupportedError: it is not a decoder-only language model, or has layers that are not causal attention.
    """
    config = load_model_config(settings)
    refuse_other_architectures(config)
    modules = build_meta_model(config, settings)
    generation = load_generation_config(settings)
    return ModelSpec(
        architecture=architecture_name(config),
        dtype=find_dtype(config, settings),
        layers=describe_layers(config, _layers_with_sinks(modules)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_tokens=_max_positions(config),
        eos_token_ids=_eos_token_ids(config, generation),
        bos_token_id=getattr(config, "bos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
        num_parameters=sum(parameter.numel() for parameter in modules.parameters()),
        kv_scales_dtype=describe_kv_scales(settings, config),
        has_qk_norm=any(_QK_NORM.search(name) for name, _ in modules.named_modules()),
    )


def refuse_other_architectures(config: Any) -> None:
    """Raises UnsupportedError, naming the architecture, for all but decoder-only language models."""
    name = architecture_name(config)
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder model; only decoder-only language models are served")
    for attribute in _OTHER_MODALITIES:
        if getattr(config, attribute, None) is not None:
            raise UnsupportedError(f"{name} takes more than text ({attribute}); only language models are served")
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_own_code:
        raise UnsupportedError(f"{name} is no causal language model that transformers knows")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{name} looks ahead (use_bidirectional_attention); only causal attention is served")
    others = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if others:
        raise UnsupportedError(
            f"{name} has layers of the types {', '.join(sorted(others))}; only {_served()} are served"
        )


def _served() -> str:
    return " and ".join(sorted(_SERVED_LAYER_TYPES))


def describe_layers(config: Any, layers_with_sinks: Collection[int] = ()) -> tuple[AttentionSpec, ...]:
    """Describes the layers from the configuration. The probe at load corrects what only the modules determine."""
    num_heads = config.num_attention_heads
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    # transformers runs latent attention (DeepSeek-V2, 2024) with its keys and values expanded to every head
    num_kv_heads = num_heads if is_latent else getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    v_head_dim = getattr(config, "v_head_dim", None) or head_dim
    if is_latent:
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return tuple(
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            sliding_window=window,
            softcap=getattr(config, "attn_logit_softcapping", None),
            has_sinks=layer in layers_with_sinks,
        )
        for layer, window in enumerate(_windows(config))
    )


def _windows(config: Any) -> list[int | None]:
    """Returns each layer's sliding window."""
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None) or (
        ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def _layers_with_sinks(modules: torch.nn.Module) -> set[int]:
    indices: Iterator[Any] = (
        getattr(module, "layer_idx", None)
        for module in modules.modules()
        if isinstance(getattr(module, "sinks", None), torch.Tensor)
    )
    return {index for index in indices if index is not None}


def find_dtype(config: Any, settings: ModelSettings) -> torch.dtype:
    """The dtype that config.json states, else that of most weights, else float32."""
    stated = getattr(config, "dtype", None) or read_stored_dtype(settings)
    if stated is None:
        logger.warning(
            "config.json states no dtype, and there are no safetensors files whose headers do: float32 is taken"
        )
        stated = torch.float32
    dtype: torch.dtype = getattr(torch, stated) if isinstance(stated, str) else stated
    if dtype not in KV_DTYPE_OF_TORCH:
        raise UnsupportedError(
            f"{architecture_name(config)} is of dtype {dtype}; float32, float16 and bfloat16 are served"
        )
    return dtype


def _max_positions(config: Any) -> int:
    name, positions = architecture_name(config), getattr(config, "max_position_embeddings", None)
    if not positions:
        raise UnsupportedError(f"{name} does not say for how many positions it was made")
    fixed = find_fixed_positions(config)
    if fixed is None or fixed >= positions:
        return int(positions)
    logger.info("%s is served up to %d positions: its rotary frequencies vary beyond with the batch", name, fixed)
    return int(fixed)


def _eos_token_ids(config: Any, generation: Any) -> tuple[int, ...]:
    eos = None if generation is None else generation.eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
