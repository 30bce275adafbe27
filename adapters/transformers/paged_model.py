"""Causal language models of transformers, run on a flattened batch without padding over a paged cache."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch

from pagedkv.plugin.attention_metadata import AttentionContext
from pagedkv.plugin.config import ModelSettings, ResolvedConfig
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import ModelSpec

from .attention import ATTENTION_NAME, CONTEXT_KEYWORD
from .checkpoint import load_causal_model, load_model_config
from .description import describe_checkpoint
from .probe import probe_layers
from .tokenizer import TransformersTokenizer


class TransformersModel:
    """Any causal model whose layers all go through transformers' attention interface."""

    interface_version: ClassVar[int] = 1

    def __init__(self, model: torch.nn.Module, spec: ModelSpec) -> None:
        self._model = model
        self.spec = spec

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        return describe_checkpoint(settings)

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> TransformersTokenizer:
        """Raises ConfigError where the checkpoint brings no tokenizer."""
        return TransformersTokenizer.load(settings)

    @classmethod
    @torch.inference_mode()
    def load(cls, config: ResolvedConfig, device: torch.device) -> TransformersModel:
        """Loads the weights and runs three tokens to see that every layer calls the context.

        Raises:
            ConfigError: weights are missing, or pickled and not allowed.
            UnsupportedError: a layer does not go through the attention interface; the text names it.
        """
        spec = describe_checkpoint(config.model).with_dtype(config.dtype)
        model_config = load_model_config(config.model)
        model = load_causal_model(
            config.model, model_config, dtype=config.dtype, device=device, attn_implementation=ATTENTION_NAME
        )
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise UnsupportedError(f"{spec.architecture} can't restrict its logits to rows (logits_to_keep)")
        return cls(model, probe_layers(model, spec))

    @torch.inference_mode()
    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        arguments: dict[str, Any] = {CONTEXT_KEYWORD: attention}
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
