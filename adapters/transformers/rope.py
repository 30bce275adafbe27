"""Rotary positions whose frequencies depend on the longest sequence of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def find_fixed_positions(model_config: Any) -> int | None:
    """Returns the number of positions up to which the rotary frequencies are fixed; None if they always are.

    transformers' `longrope` and `dynamic` change the frequencies of a whole batch by its largest position. Beyond this
    limit a sequence's keys would depend on other sequences, and cached keys would be wrong.
    """
    fixed = [
        parameters.get("original_max_position_embeddings") or model_config.max_position_embeddings
        for parameters in _rope_parameters(model_config)
        if "dynamic" in parameters.get("rope_type", "default") or parameters.get("rope_type") == "longrope"
    ]
    return min(fixed, default=None)


def _rope_parameters(model_config: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(model_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
