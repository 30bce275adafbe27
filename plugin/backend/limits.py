"""The lengths that a warmed-up backend accepts, from the config, the model and the server's warm-up request."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class EffectiveLimits:
    max_input_tokens: int
    max_total_tokens: int
    is_total_demanded: bool
    """Whether the server asked for max_total_tokens, so that a cache too small for it is an error."""

    @classmethod
    def create(cls, wanted: WarmupLimits, config: ResolvedConfig, model: ModelSpec) -> EffectiveLimits:
        """Makes limits from the warm-up request, and from the config for those that it leaves open.

        Raises:
            CapacityError: the request asks for more tokens than the model has positions.
        """
        max_total_tokens = wanted.max_total_tokens or config.max_total_tokens
        if max_total_tokens > model.max_position_tokens:
            raise CapacityError(
                f"max_total_tokens of {max_total_tokens} is asked for, but the model was made for "
                f"{model.max_position_tokens} tokens; lower the flag"
            )
        max_input_tokens = wanted.max_input_tokens or min(config.max_input_tokens, max_total_tokens - 1)
        if max_input_tokens >= max_total_tokens:
            raise CapacityError(
                f"max_input_tokens of {max_input_tokens} must be below max_total_tokens of {max_total_tokens}, "
                "which also counts the output"
            )
        return cls(max_input_tokens, max_total_tokens, wanted.max_total_tokens > 0)
