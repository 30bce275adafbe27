"""Rotary positions whose frequencies depend on the longest sequence of a batch are not served beyond that point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedkv.plugin.errors import UnsupportedError

from .checkpoint import architecture_name


def refuse_varying_frequencies(model_config: Any, max_total_tokens: int) -> None:
    """transformers' `longrope` and `dynamic` change the frequencies of a whole batch with its largest position: a
    sequence's keys would depend on its neighbours, and cached ones would be wrong.

    Raises:
        UnsupportedError: sequences may become longer than the positions up to which the frequencies stay.
    """
    for parameters in _rope_parameters(model_config):
        rope_type = parameters.get("rope_type", "default")
        if "dynamic" not in rope_type and rope_type != "longrope":
            continue
        fixed = parameters.get("original_max_position_embeddings") or model_config.max_position_embeddings
        if max_total_tokens > fixed:
            raise UnsupportedError(
                f"{architecture_name(model_config)} changes its rotary frequencies ({rope_type}) for the whole batch "
                f"when one sequence is longer than {fixed} tokens; set limits.max_total_tokens to {fixed} or less"
            )


def _rope_parameters(model_config: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(model_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
