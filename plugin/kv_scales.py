"""Static scales of keys and values: from a file, or from the checkpoint.

The file is safetensors with two tensors a layer, [num_kv_heads] float32: `layers.0.k_scale`, `layers.0.v_scale`,
`layers.1.k_scale`, …; a number is element × scale. `pagedkv calibrate` writes it. A checkpoint usually has one number a
layer, which is used for all heads of the layer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import KVDtype
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec

logger = logging.getLogger(__name__)

LayerScales = tuple[torch.Tensor, torch.Tensor]
"""k_scale and v_scale of one layer: [num_kv_heads] float32."""

_MAX_HEADER_BYTES = 100_000_000


@runtime_checkable
class BringsKVScales(Protocol):
    """Optional interface of a ModelAdapter: returns the scales that its checkpoint contains."""

    def kv_scales(self) -> Mapping[str, torch.Tensor]:
        """Scales of the whole model, named as in a file of scales: [num_kv_heads] or one number. Empty if none."""


def key_scale_name(layer: int) -> str:
    return f"layers.{layer}.k_scale"


def value_scale_name(layer: int) -> str:
    return f"layers.{layer}.v_scale"


def read_kv_scales(
    file: str, layers: Sequence[AttentionSpec], device: torch.device, *, shard: int = 0, num_shards: int = 1
) -> list[LayerScales]:
    """Reads a file of scales. Raises ConfigError as `pick_kv_scales` does, or if it is not a safetensors file."""
    return pick_kv_scales(
        _read_safetensors(Path(file)), layers, device, source=file, shard=shard, num_shards=num_shards
    )


def pick_kv_scales(
    tensors: Mapping[str, torch.Tensor],
    layers: Sequence[AttentionSpec],
    device: torch.device,
    *,
    source: str,
    shard: int = 0,
    num_shards: int = 1,
) -> list[LayerScales]:
    """Selects this shard's scales of every layer.

    Args:
        tensors: scales of the whole model, by name; other names are ignored.
        layers: of this shard.
        source: origin of the tensors, for error messages.

    Raises:
        ConfigError: a layer has no scales (the message names all such layers), has too few or too many, or some are
            not positive.
    """
    missing = [
        layer for layer in range(len(layers)) if not {key_scale_name(layer), value_scale_name(layer)} <= tensors.keys()
    ]
    if missing:
        raise ConfigError(
            f"{source} has no k_scale and v_scale for the layers {', '.join(map(str, missing))}; this model has "
            f"{len(layers)} layers: calibrate again on it (pagedkv calibrate)"
        )
    return [
        (
            _pick_heads(tensors, key_scale_name(layer), spec.num_kv_heads, source, shard, num_shards).to(device),
            _pick_heads(tensors, value_scale_name(layer), spec.num_kv_heads, source, shard, num_shards).to(device),
        )
        for layer, spec in enumerate(layers)
    ]


def _pick_heads(
    tensors: Mapping[str, torch.Tensor], name: str, num_kv_heads: int, source: str, shard: int, num_shards: int
) -> torch.Tensor:
    scales = tensors[name].float().flatten()
    if not (scales.isfinite() & (scales > 0)).all():
        raise ConfigError(f"{source}: {name} has scales that are not positive numbers")
    if len(scales) == 1:
        return scales.repeat(num_kv_heads)
    first = shard * len(scales) // num_shards
    picked = scales[first : first + num_kv_heads]
    # Heads are divided among the shards; if there are fewer heads than shards, some shards hold the same head.
    if len(picked) != num_kv_heads or len(scales) not in (num_kv_heads * num_shards, *range(1, num_shards)):
        raise ConfigError(
            f"{source}: {name} has {len(scales)} scales, which do not fit {num_kv_heads} KV heads on each of "
            f"{num_shards} shards"
        )
    return picked.clone()


def load_kv_scales(
    kv_dtype: KVDtype,
    file: str,
    model: object,
    layers: Sequence[AttentionSpec],
    device: torch.device,
    *,
    shard: int = 0,
    num_shards: int = 1,
) -> list[LayerScales]:
    """Loads static scales for a KV dtype that needs them: from the file, or without one from the model's checkpoint.

    Args:
        model: a ModelAdapter, which may be a `BringsKVScales`.
        layers: of this shard.

    Raises:
        ConfigError: there are no scales, or they do not match the layers.
    """
    if file:
        return read_kv_scales(file, layers, device, shard=shard, num_shards=num_shards)
    tensors = model.kv_scales() if isinstance(model, BringsKVScales) else {}
    if not tensors:
        raise ConfigError(
            f"the KV dtype {kv_dtype.name} needs scales, and the checkpoint brings none: set cache.kv_scales to a file "
            "made by pagedkv calibrate, or use the KV dtype with a scale per token"
        )
    return pick_kv_scales(tensors, layers, device, source="the checkpoint", shard=shard, num_shards=num_shards)


def warn_of_unsafe_scales(scales: Sequence[LayerScales], spec: ModelSpec) -> None:
    """Logs a warning if all scales are 1.0, which is no calibration, and nothing in the model bounds its keys."""
    if spec.has_qk_norm or not all(bool((scale == 1).all()) for layer in scales for scale in layer):
        return
    logger.warning(
        "every scale of keys and values is 1.0 and %s does not normalize its keys: numbers beyond the range of the KV "
        "dtype are cut off, small ones lost; use a KV dtype with scales per token, or scales from pagedkv calibrate",
        spec.architecture,
    )


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """All float32 tensors of a file. Raises ConfigError."""
    try:
        raw = file.read_bytes()
        header_bytes = int.from_bytes(raw[:8], "little")
        if not 0 < header_bytes <= min(len(raw) - 8, _MAX_HEADER_BYTES):
            raise ValueError("it has no header")
        header = json.loads(raw[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        return {name: _read_tensor(raw[8 + header_bytes :], entry) for name, entry in header.items()}
    except OSError as error:
        raise ConfigError(f"can't read the file of scales {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a safetensors file of scales: {error}") from error


def _read_tensor(data: bytes, entry: Mapping[str, Any]) -> torch.Tensor:
    if entry["dtype"] != "F32":
        raise ValueError(f"it holds {entry['dtype']}, not F32")
    start, end = entry["data_offsets"]
    numbers = np.frombuffer(data[start:end], dtype="<f4").copy()
    return torch.from_numpy(numbers).reshape(entry["shape"])
