"""Limits how many rows of logits are processed at once."""

from __future__ import annotations

import torch

_MAX_CPU_VALUES = 2**19
_MAX_GPU_VALUES = 2**24


def max_rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Number of rows whose temporaries fit a CPU's cache, or a small part of a GPU's memory (64 MiB in float32)."""
    max_values = _MAX_CPU_VALUES if device.type == "cpu" else _MAX_GPU_VALUES
    return max(1, max_values // vocab_size)
