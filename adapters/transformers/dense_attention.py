"""Attention over a few tokens without a cache, to compare two ways of running a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedkv.plugin.attention_metadata import AttentionOptions


@dataclass(slots=True)
class DenseAttention:
    """Replaces an AttentionContext for one sequence of tokens. Records each layer's options."""

    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Like `AttentionContext.attend`, with causal attention in float32."""
        self.options[layer] = options
        group = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        distance = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
        hidden = distance < 0
        if options.sliding_window is not None:
            hidden |= distance >= options.sliding_window
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
