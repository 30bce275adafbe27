"""The attention function that transformers calls in every layer; it gets the step's context as an argument.

The context is a keyword argument of the model's forward; transformers passes unknown keywords to the attention
function. So two engines in one process can't affect each other.

No mask function is registered under our name. So transformers builds no mask, and does not look for packed sequences in
the positions, which would wait for the device at each step. The block tables determine which tokens a query sees.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from pagedkv.plugin.attention_metadata import AttentionOptions, LayerAttention
from pagedkv.plugin.errors import UnsupportedError

ATTENTION_NAME = "pagedkv"
CONTEXT_KEYWORD = "pagedkv_attention"

_CHANGES_SCORES = ("position_bias", "alibi", "attention_bias")
"""Keywords with which some models change the scores."""


def attend_through_context(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' AttentionInterface, over a flattened batch.

    Args:
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim], of the new tokens only.
        value: [1, num_kv_heads, num_tokens, v_head_dim].
        attention_mask: must be None; a model that makes its own mask is refused.
        s_aux: [num_heads], the layer's sinks.

    Returns:
        [1, num_tokens, num_heads, v_head_dim], and no attention weights.

    Raises:
        UnsupportedError: the layer uses something that a context does not support.
    """
    context: LayerAttention | None = kwargs.get(CONTEXT_KEYWORD)
    if context is None:
        raise UnsupportedError("an attention layer drops the keyword arguments of the model's forward")
    _refuse_other_scores(module, attention_mask, kwargs)
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = context.attend(layer, _token_major(query), _token_major(key), _token_major(value), options)
    return output.unsqueeze(0), None


def _refuse_other_scores(module: torch.nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    if mask is not None:
        raise UnsupportedError("an attention layer brings an attention mask of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError("an attention layer looks ahead (is_causal is False)")
    for name in _CHANGES_SCORES:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"an attention layer adds a {name} to its scores")


def _token_major(states: torch.Tensor) -> torch.Tensor:
    """Converts [1, heads, num_tokens, dim] to [num_tokens, heads, dim] with a contiguous last dim; usually a view."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


AttentionInterface.register(ATTENTION_NAME, attend_through_context)
