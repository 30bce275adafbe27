"""A causal model as transformers runs it: left-padded batch, attention mask, `past_key_values`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import ResolvedConfig

from .checkpoint import load_causal_model, load_model_config
from .contiguous_batch import PaddedInput
from .contiguous_cache import ReservedCache
from .description import describe_checkpoint


class ContiguousModel:
    """Runs a model with transformers' own attention: sdpa, or eager if the architecture needs it."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        missing = {"position_ids", "attention_mask", "logits_to_keep"} - set(parameters)
        if missing:
            raise UnsupportedError(f"{spec.architecture} can't run a left-padded batch: it takes no {sorted(missing)}")
        self.spec = spec
        self.device: torch.device = next(model.parameters()).device
        self.bytes_per_token = self._measure_bytes_per_token()

    @classmethod
    def load(cls, config: ResolvedConfig) -> ContiguousModel:
        """Loads the model. Raises ConfigError and UnsupportedError, like the model adapter."""
        spec = describe_checkpoint(config.model).with_dtype(config.dtype)
        model_config = load_model_config(config.model)
        model = load_causal_model(
            config.model, model_config, dtype=config.dtype, device=config.device, attn_implementation=None
        )
        return cls(model, spec)

    @property
    def attention_name(self) -> str:
        return str(self._model.config._attn_implementation)

    def make_cache(self, max_columns: int) -> ReservedCache:
        return ReservedCache(len(self.spec.layers), max_columns)

    @torch.inference_mode()
    def forward(self, batch: PaddedInput, cache: ReservedCache, *, needs_all_logits: bool = False) -> torch.Tensor:
        """Computes the new columns and adds their keys and values to the cache.

        Returns:
            [num_rows, vocab_size] logits of the last column; [num_rows, num_new_columns, vocab_size] of all new ones
            with `needs_all_logits`.
        """
        arguments: dict[str, Any] = {self._cache_keyword: cache}
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=True,
            logits_to_keep=0 if needs_all_logits else 1,
            **arguments,
        )
        logits: torch.Tensor = output.logits
        return logits if needs_all_logits else logits[:, -1]

    def _measure_bytes_per_token(self) -> int:
        """Measures the KV bytes of one token in all layers with a forward of one token."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        cache = self.make_cache(max_columns=1)
        self.forward(PaddedInput(token, token, torch.ones_like(token)), cache)
        return cache.num_reserved_bytes
