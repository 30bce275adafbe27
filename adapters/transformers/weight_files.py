"""The safetensors files of a checkpoint, and what their headers say. Reads no weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from pagedkv.plugin.resolved_config import ModelSettings

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by their names in headers. Others are those of quantized weights, of indices and of masks."""


def list_weight_files(settings: ModelSettings) -> list[Path]:
    """The files that the index names, else `model.safetensors`, else all of the directory; those that are here."""
    config = cached_file(settings.path, "config.json", revision=settings.revision or "main", local_files_only=True)
    folder = Path(config).parent
    try:
        named = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        named = {_SINGLE}
    return sorted(folder / name for name in named if (folder / name).is_file()) or sorted(folder.glob("*.safetensors"))


def read_stored_dtype(settings: ModelSettings) -> torch.dtype | None:
    """The dtype of most weights, by their headers; None if there is no readable safetensors file."""
    num_elements: Counter[torch.dtype] = Counter()
    for file in list_weight_files(settings):
        num_elements += _count_elements(file)
    return max(num_elements, key=num_elements.__getitem__, default=None)


def _count_elements(file: Path) -> Counter[torch.dtype]:
    """The number of elements of each dtype of weights; none where the file can't be read."""
    counts: Counter[torch.dtype] = Counter()
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                header = weights.get_slice(name)
                if header.get_dtype() in _DTYPES:
                    counts[_DTYPES[header.get_dtype()]] += math.prod(header.get_shape())
    except (OSError, SafetensorError):
        return Counter()
    return counts
