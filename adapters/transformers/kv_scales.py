"""Scales of keys and values that a quantized checkpoint brings beside its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from pagedkv.plugin.kv_scales import key_scale_name, value_scale_name
from pagedkv.plugin.resolved_config import ModelSettings

_NAMES = re.compile(r"\blayers\.(\d+)\..*\b([kv])_scale$")
"""As `model.layers.3.self_attn.k_scale`, of compressed-tensors and of others."""
_SCALE_NAMES = {"k": key_scale_name, "v": value_scale_name}
_KV_DTYPES: dict[tuple[Any, Any], str] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
"""Of compressed-tensors' type and number of bits."""


def describe_kv_scales(settings: ModelSettings, config: Any) -> str | None:
    """Name of the KV dtype for which the checkpoint brings scales; None where it brings none, or for another one.

    compressed-tensors' `kv_cache_scheme` says the dtype; scales without it are for 8-bit floats, as is the custom.
    """
    if not any(True for _ in _find_scales(settings)):
        return None
    scheme = _kv_cache_scheme(config)
    return "fp8_e4m3" if scheme is None else _KV_DTYPES.get((scheme.get("type"), scheme.get("num_bits")))


def load_checkpoint_scales(settings: ModelSettings) -> dict[str, torch.Tensor]:
    """The scales, named as `pagedkv.plugin.kv_scales` says; empty where there are none."""
    scales = {}
    for file, name, renamed in _find_scales(settings):
        with safe_open(file, framework="pt") as weights:
            scales[renamed] = weights.get_tensor(name)
    return scales


def _kv_cache_scheme(config: Any) -> dict[str, Any] | None:
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    scheme: dict[str, Any] | None = quantization.get("kv_cache_scheme")
    return scheme


def _find_scales(settings: ModelSettings) -> Iterator[tuple[Path, str, str]]:
    """The file of each scale, its name there and ours."""
    for file in _weight_files(settings):
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
        for name in names:
            match = _NAMES.search(name)
            if match:
                yield file, name, _SCALE_NAMES[match[2]](int(match[1]))


def _weight_files(settings: ModelSettings) -> list[Path]:
    config = cached_file(settings.path, "config.json", revision=settings.revision or "main", local_files_only=True)
    return sorted(Path(config).parent.glob("*.safetensors"))
