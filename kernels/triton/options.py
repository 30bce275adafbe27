"""Converts `AttentionOptions` and a model's heads to arguments of the attention kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.kernels.triton.launch import LOG2_E
from pagedkv.plugin.attention_metadata import AttentionOptions

_MAX_TILE_HEADS = 16
"""Most query heads in a tile: the rows of the narrowest matrix instruction. A larger group uses several tiles."""


def option_arguments(options: AttentionOptions) -> Mapping[str, Any]:
    """Arguments for an `AttentionOptions`. With a soft cap, scores are scaled for tanh, and to base 2 after it."""
    softcap = options.softcap
    return {
        "sinks_ptr": options.sinks,
        "slopes_ptr": options.alibi_slopes,
        "score_scale": float(options.scale * LOG2_E if softcap is None else options.scale / softcap),
        "cap": float((softcap or 0.0) * LOG2_E),
        "window": options.sliding_window or 0,
        "HAS_WINDOW": options.sliding_window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "HAS_ALIBI": options.alibi_slopes is not None,
    }


def head_constants(num_heads: int, num_kv_heads: int) -> dict[str, int]:
    """Constants that describe how the query heads of a KV head are divided into tiles."""
    group = num_heads // num_kv_heads
    tile_heads = min(group, _MAX_TILE_HEADS)
    return {"GROUP": group, "TILE_HEADS": tile_heads, "HEAD_TILES": -(-group // tile_heads)}
