"""The contract of decoder kernels: fused code for all parts of a Llama-shaped model's layers around their attention.

A model adapter that recognizes the shape passes its weights to the decoder kernels and keeps none. A model that it does
not recognize, or that the kernels don't support, runs through the modules of the model itself.

    x                    = embedding[token_ids] × embedding_scale
    for each layer:
        q, k, v          = rotate(norm(x) @ qkv)                    then attention over the cache
        x               += norm?(attention @ attention_output)
        x               += norm?((activation(gate) × up) @ down)    gate, up = norm(x) @ gate_up
    logits               = norm(x) @ head

norm is the RMS norm (Zhang & Sennrich 2019). Its weights are the factors: if a model adds 1 to them, they include it.
Rotary positions (Su et al. 2021) rotate the first half of a head's rotated channels against the second half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import torch

from pagedkv.plugin.attention_metadata import AttentionOptions, LayerAttention
from pagedkv.plugin.features import InterfaceVersion
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import AttentionSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x @ weight.T + bias."""

    weight: torch.Tensor
    """[out_features, in_features] in the model's dtype."""
    bias: torch.Tensor | None = None
    """[out_features]."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary tables of one kind of layer. They include the scaling of frequencies and of the result."""

    cos: torch.Tensor
    """[max_positions, rotated channels / 2] float32."""
    sin: torch.Tensor
    """Shape and dtype as `cos`."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights. Norm weights are [hidden_size] float32, those of queries and keys [head_dim]."""

    input_norm: torch.Tensor
    qkv: Projection
    """Queries, then keys, then values: (num_heads + 2 × num_kv_heads) × head_dim features."""
    attention_output: Projection
    feed_forward_norm: torch.Tensor
    gate_up: Projection
    """All gate projections, then all up projections: 2 × intermediate_size features."""
    down: Projection
    rotary: Rotary | None
    """None if the layer has no rotary positions."""
    options: AttentionOptions
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_output_norm: torch.Tensor | None = None
    """Norm of the attention's output before it is added (Gemma 2)."""
    feed_forward_output_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What is the same in all layers, known before weights are loaded."""

    attention: AttentionSpec
    """Heads and dims; windows and soft caps may differ from layer to layer."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    activation: Activation
    norm_eps: float
    embedding_scale: float = 1.0
    logits_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model."""

    shape: DecoderShape
    embedding: torch.Tensor
    """[vocab_size, hidden_size]."""
    layers: Iterator[DecoderLayer]
    """In order. Each is read once, so that at most one layer is in memory twice."""
    final_norm: torch.Tensor
    """[hidden_size] float32."""
    head: Projection | None
    """None if the embedding is also the head."""


class Decoder(Protocol):
    """A model that decoder kernels can run."""

    def forward(self, batch: ModelInput, attention: LayerAttention) -> torch.Tensor:
        """Like `ModelAdapter.forward`. Returns [num_rows, vocab_size] logits, in the model's dtype or float32."""


@runtime_checkable
class DecoderKernels(Protocol):
    """Makes decoders for a device."""

    interface_version: ClassVar[InterfaceVersion]
    name: str

    @classmethod
    def create(cls, device: torch.device) -> Self: ...

    def unsupported_reasons(self, shape: DecoderShape, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why a model can't run on this device; empty if it can."""

    def build(self, weights: DecoderWeights) -> Decoder:
        """Makes a decoder. It copies the weights that need another layout, and keeps references to the others."""
