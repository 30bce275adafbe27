"""Reads the scales of keys and values that a quantized checkpoint contains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pagedkv.plugin.kv_scales import key_scale_name, value_scale_name
from pagedkv.plugin.resolved_config import ModelSettings

from .weight_files import list_weight_files

_NAMES = re.compile(r"\blayers\.(\d+)\..*\b([kv])_scale$")
"""Names of scales such as `model.layers.3.self_attn.k_scale`, of compressed-tensors and others."""
_SCALE_NAMES = {"k": key_scale_name, "v": value_scale_name}
_KV_DTYPES: dict[tuple[Any, Any], str] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
"""KV dtypes by compressed-tensors' type and number of bits."""


def describe_kv_scales(settings: ModelSettings, config: Any) -> str | None:
    """Returns the name of the KV dtype of the checkpoint's scales; None if it has none, or for an unknown dtype.

    compressed-tensors' `kv_cache_scheme` names the dtype. Scales without it are for 8-bit floats, as is usual.
    """
    if not any(True for _ in _find_scales(settings)):
        return None
    scheme = _kv_cache_scheme(config)
    return "fp8_e4m3" if scheme is None else _KV_DTYPES.get((scheme.get("type"), scheme.get("num_bits")))


def load_checkpoint_scales(settings: ModelSettings) -> dict[str, torch.Tensor]:
    """Loads the scales, with the names of `pagedkv.plugin.kv_scales`; empty if there are none."""
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
    """Yields the file of each scale, its name there, and our name."""
    for file in list_weight_files(settings):
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
        for name in names:
            match = _NAMES.search(name)
            if match:
                yield file, name, _SCALE_NAMES[match[2]](int(match[1]))
