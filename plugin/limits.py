"""The limits that a warmed-up backend keeps and tells: as asked for, else as configured, within what its cache holds.

Every backend resolves them here, so that a server's clients meet the same rules whichever backend runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """Made by `resolve_limits`, before the cache is sized; `fit` makes those that hold afterwards."""

    max_input_tokens: int
    """Tokens of one prompt: at least 1, below max_total_tokens."""
    max_total_tokens: int
    """Tokens of one prompt and its output."""
    max_prefill_tokens: int
    """Prompt tokens of one step."""
    max_step_tokens: int
    """Tokens of one step if prompts are computed in chunks: the smaller of the config's and max_prefill_tokens."""
    max_num_sequences: int
    """Sequences in one step."""
    min_cache_tokens: int
    """What the lengths that were asked for take: a cache that holds less is an error. Others follow the cache."""

    def fit(self, num_cache_tokens: int) -> ResolvedLimits:
        """The limits in a cache of so many tokens. Lengths that nobody asked for become as short as it takes.

        Raises:
            CapacityError: the lengths that were asked for do not fit.
        """
        if num_cache_tokens < self.min_cache_tokens:
            raise CapacityError(
                f"the cache holds {num_cache_tokens} tokens, one request of the lengths asked for takes "
                f"{self.min_cache_tokens}: raise cache.memory, cache.num_blocks or cache.memory_fraction, or lower "
                "max_total_tokens"
            )
        max_total_tokens = min(self.max_total_tokens, num_cache_tokens)
        max_input_tokens = min(self.max_input_tokens, max_total_tokens - 1)
        return replace(self, max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens)


def resolve_limits(
    wanted: WarmupLimits, config: ResolvedConfig, model: ModelSpec, *, can_chunk_prefill: bool
) -> ResolvedLimits:
    """What was asked for, else what the config says. Lengths that were asked for are taken as they are, or refused.

    Args:
        can_chunk_prefill: of the backend. Where it can't, or `wanted` forbids it, a prompt is one step's work: where
            its length was left open, max_prefill_tokens bounds it too.

    Raises:
        CapacityError: more is asked for than the model has positions, or a prompt leaves no room for output.
    """
    max_total_tokens = wanted.max_total_tokens or config.max_total_tokens
    if max_total_tokens > model.max_position_tokens:
        raise CapacityError(
            f"max_total_tokens of {max_total_tokens} is asked for, but the model was made for "
            f"{model.max_position_tokens} tokens; lower it"
        )
    max_input_tokens = wanted.max_input_tokens or min(
        config.max_input_tokens, max_total_tokens - 1, _max_unchunked_tokens(wanted, can_chunk_prefill)
    )
    if not 1 <= max_input_tokens < max_total_tokens:
        raise CapacityError(
            f"max_input_tokens of {max_input_tokens} must be at least 1 and below max_total_tokens of "
            f"{max_total_tokens}, which also counts the output"
        )
    return ResolvedLimits(
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        max_prefill_tokens=wanted.max_prefill_tokens or config.scheduler.max_step_tokens,
        max_step_tokens=min(config.scheduler.max_step_tokens, wanted.max_prefill_tokens or sys.maxsize),
        max_num_sequences=min(
            config.scheduler.max_num_sequences, wanted.max_batch_size or config.scheduler.max_num_sequences
        ),
        min_cache_tokens=max(2, wanted.max_total_tokens, wanted.max_input_tokens and wanted.max_input_tokens + 1),
    )


def _max_unchunked_tokens(wanted: WarmupLimits, can_chunk_prefill: bool) -> int:
    is_chunked = can_chunk_prefill and wanted.may_chunk_prefill
    return sys.maxsize if is_chunked or not wanted.max_prefill_tokens else wanted.max_prefill_tokens
