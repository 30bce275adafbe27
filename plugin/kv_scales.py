"""Scales of keys and values from outside the blocks: from a file, or from the checkpoint.

The file is safetensors with two tensors a layer, [num_kv_heads] float32: `layers.0.k_scale`, `layers.0.v_scale`,
`layers.1.k_scale`, …; a number is element × scale. `pagedkv calibrate` writes it. A checkpoint brings scales of one
number a layer as a rule, which then holds for all its heads.
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
    """What a ModelAdapter may do besides: give the scales that its checkpoint holds."""

    def kv_scales(self) -> Mapping[str, torch.Tensor]:
        """Named as in a file of scales; of the whole model, [num_kv_heads] or one number. Empty where it has none."""


def key_scale_name(layer: int) -> str:
    return f"layers.{layer}.k_scale"


def value_scale_name(layer: int) -> str:
    return f"layers.{layer}.v_scale"


def read_kv_scales(
    file: str, layers: Sequence[AttentionSpec], device: torch.device, *, shard: int = 0, num_shards: int = 1
) -> list[LayerScales]:
    """Reads a file of scales. Raises ConfigError as `pick_kv_scales` does, or where it is no safetensors file."""
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
    """This shard's scales of every layer.

    Args:
        tensors: of the whole model, by name; what has another name is ignored.
        layers: of this shard.
        source: where they are from, for errors.

    Raises:
        ConfigError: a layer has no scales (all such layers are named), too few or many, or some that are not positive.
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
    # Shards divide the heads among them; where there are fewer heads than shards, some hold the same one.
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
    """Static scales of a KV dtype that needs them: the file's, or without one those of the model's checkpoint.

    Args:
        model: a ModelAdapter, which may be a `BringsKVScales`.
        layers: of this shard.

    Raises:
        ConfigError: there are none, or they do not fit the layers.
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
    """Logs a warning where all scales are 1.0, which is no calibration, and nothing in the model bounds its keys."""
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
