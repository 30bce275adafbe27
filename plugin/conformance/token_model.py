"""A tiny model whose next token depends on every token and position of its context, through the real cache.

Each token's value is a fingerprint of the token and its position. Attention with equal weights over the context gives
the mean fingerprint, and the logits are a fixed projection of it. A block with wrong, missing or stale content changes
the output; `continue_greedily` computes the right one without a cache. There are no weights and no tokenizer: a step
takes almost no time, so that a measurement around it shows the backend's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionOptions
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import ModelInput, Tokenizer
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec

if TYPE_CHECKING:
    from pagedkv.plugin.resolved_config import ModelSettings, ResolvedConfig

HEAD_DIM = 32


class TokenModel:
    """A ModelAdapter without a checkpoint; create it directly."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, vocab_size: int = 97, max_position_tokens: int = 8192, num_layers: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self._token_phase = torch.rand(vocab_size, HEAD_DIM, generator=generator) * 6.28
        self._position_phase = torch.rand(HEAD_DIM, generator=generator) * 6.28
        self._projection = torch.randn(HEAD_DIM, vocab_size, generator=generator)
        layer = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM)
        self.spec = ModelSpec(
            architecture="TokenModel",
            dtype=torch.float32,
            layers=(layer,) * num_layers,
            vocab_size=vocab_size,
            hidden_size=HEAD_DIM,
            max_position_tokens=max_position_tokens,
            eos_token_ids=(0,),
            bos_token_id=None,
            pad_token_id=None,
        )

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        return cls().spec

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> Tokenizer:
        raise UnsupportedError("the token model has no text")

    @classmethod
    def load(cls, config: ResolvedConfig, device: torch.device) -> TokenModel:
        return cls()

    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        fingerprints = self._fingerprints(batch.token_ids, batch.positions)[:, None]
        zeros = torch.zeros_like(fingerprints)
        for layer in range(len(self.spec.layers)):
            mean = attention.attend(layer, zeros, zeros, fingerprints, AttentionOptions(scale=1.0))
        return mean[batch.logit_rows, 0] @ self._projection

    def continue_greedily(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Computes the right output, without a cache or a batch."""
        token_ids = list(prompt_ids)
        positions = torch.arange(len(token_ids) + num_tokens)
        total = self._fingerprints(torch.tensor(token_ids), positions[: len(token_ids)]).sum(0)
        for _ in range(num_tokens):
            token_ids.append(int((total / len(token_ids) @ self._projection).argmax()))
            total = total + self._fingerprints(torch.tensor(token_ids[-1:]), positions[len(token_ids) - 1, None])[0]
        return token_ids[len(prompt_ids) :]

    def _fingerprints(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens, HEAD_DIM] float32."""
        return torch.cos(self._token_phase[token_ids] + positions[:, None] * self._position_phase)
