"""Causal language models of transformers, run on a flattened batch without padding over a paged cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from pagedkv.plugin.attention_metadata import AttentionContext
from pagedkv.plugin.decoder import Decoder
from pagedkv.plugin.distributed import ShardInfo, joined_group
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.registry import DECODERS, create_plugin
from pagedkv.plugin.resolved_config import ModelSettings, ResolvedConfig

from .attention import ATTENTION_NAME, CONTEXT_KEYWORD
from .checkpoint import build_meta_model, load_causal_model, load_model_config
from .description import describe_checkpoint
from .fused_decoder import DecoderMismatchError, build_fused_decoder
from .kv_scales import load_checkpoint_scales
from .probe import probe_layers
from .sharding import check_split, has_shared_heads, keep_shared_head, plan_split
from .tokenizer import TransformersTokenizer

logger = logging.getLogger(__name__)

OFF = "off"
"""Value of `model.decoder` with which every model runs through its modules."""


class TransformersModel:
    """Any causal model whose layers all go through transformers' attention interface."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(
        self,
        model: torch.nn.Module | None,
        spec: ModelSpec,
        kv_scales: Mapping[str, torch.Tensor] | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """Makes an adapter that runs `decoder` if there is one, else `model`."""
        self._model = model
        self._decoder = decoder
        self._kv_scales = kv_scales or {}
        self.spec = spec

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        return describe_checkpoint(settings)

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> TransformersTokenizer:
        """Loads the tokenizer. Raises ConfigError if the checkpoint has none."""
        return TransformersTokenizer.load(settings)

    @classmethod
    @torch.inference_mode()
    def load(cls, config: ResolvedConfig, device: torch.device) -> TransformersModel:
        """Loads the weights, and runs three tokens to check that every layer calls the context.

        If the process has joined a group, loads only this shard's part.

        Raises:
            ConfigError: weights are missing, or pickled and not allowed.
            UnsupportedError: a layer does not use the attention interface, or the model can't be split over this many
                shards; the message says why.
        """
        spec = describe_checkpoint(config.model).with_dtype(config.dtype)
        group = joined_group()
        if group is not None:
            return cls._load_shard(config, device, spec, group.info)
        model = _load_whole(config, device)
        spec = _probe(model, spec)
        scales = load_checkpoint_scales(config.model)
        if config.model.decoder == OFF:
            return cls(model, spec, scales)
        kernels = create_plugin(DECODERS, config.model.decoder, config.plugins, device)
        try:
            decoder = build_fused_decoder(model, spec, kernels)
        except DecoderMismatchError as error:
            logger.warning("the decoder kernels %s are not used: %s; loading the model again", kernels.name, error)
            return cls(_load_whole(config, device), spec, scales)
        return cls(model if decoder is None else None, spec, scales, decoder)

    @classmethod
    def _load_shard(
        cls, config: ResolvedConfig, device: torch.device, spec: ModelSpec, shard: ShardInfo
    ) -> TransformersModel:
        model_config = load_model_config(config.model)
        split = plan_split(spec, build_meta_model(model_config, config.model), shard.num_shards)
        model = load_causal_model(
            config.model,
            model_config,
            dtype=config.dtype,
            device=device,
            attn_implementation=ATTENTION_NAME,
            split=split,
        )
        if has_shared_heads(spec, shard.num_shards):
            keep_shared_head(model, spec, shard)
        part = _probe(model, spec)
        check_split(spec, part, shard.num_shards)
        return cls(model, part, load_checkpoint_scales(config.model))

    def kv_scales(self) -> Mapping[str, torch.Tensor]:
        """Returns the checkpoint's scales of keys and values, with the names of `pagedkv.plugin.kv_scales`."""
        return self._kv_scales

    @torch.inference_mode()
    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        if self._decoder is not None:
            return self._decoder.forward(batch, attention)
        assert self._model is not None
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


def _load_whole(config: ResolvedConfig, device: torch.device) -> torch.nn.Module:
    return load_causal_model(
        config.model,
        load_model_config(config.model),
        dtype=config.dtype,
        device=device,
        attn_implementation=ATTENTION_NAME,
    )


def _probe(model: torch.nn.Module, spec: ModelSpec) -> ModelSpec:
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(f"{spec.architecture} can't restrict its logits to rows (logits_to_keep)")
    return probe_layers(model, spec)
