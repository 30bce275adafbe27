"""Conformance suite for `DecoderKernels` plugins, in pytest.

A plugin author's test file:

    from pagedkv.plugin.conformance.decoder import DecoderConformance

    class TestMyDecoder(DecoderConformance):
        def make_kernels(self) -> DecoderKernels:
            return MyDecoderKernels.create(torch.device("cpu"))

The oracle is the formula of `pagedkv.plugin.decoder` in float64. Each token attends to all tokens of the batch, so that
a decoder's queries, keys and values all affect the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from pagedkv.plugin.attention_metadata import AttentionOptions
from pagedkv.plugin.decoder import (
    DecoderKernels,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    Projection,
    Rotary,
)
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import AttentionSpec

MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Case:
    """A model's shape and which optional weights it has."""

    name: str
    shape: DecoderShape
    has_biases: bool = False
    has_head_norms: bool = False
    has_output_norms: bool = False
    is_tied: bool = True
    rotated_share: float = 1.0


def make_shape(
    *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, hidden: int = 64, ffn: int = 96, **rest: Any
) -> DecoderShape:
    attention = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim)
    base = DecoderShape(attention, 2, hidden, ffn, vocab_size=150, activation="silu", norm_eps=1e-5)
    return replace(base, **rest)


CASES = [
    Case("llama", make_shape()),
    Case("smollm", make_shape(num_heads=9, num_kv_heads=3, hidden=144)),
    Case("qwen2", make_shape(), has_biases=True, is_tied=False),
    Case("qwen3", make_shape(head_dim=32), has_head_norms=True),
    Case("phi3", make_shape(ffn=72), rotated_share=0.5, is_tied=False),
    Case("no positions", make_shape(), rotated_share=0.0),
    Case(
        "gemma2",
        make_shape(activation="gelu_tanh", embedding_scale=8.0, logits_softcap=20.0),
        has_output_norms=True,
    ),
    Case("gelu", make_shape(activation="gelu", num_kv_heads=4)),
    Case("odd sizes", make_shape(hidden=70, ffn=50, vocab_size=131, head_dim=8)),
]


class BatchAttention:
    """Attention of every token over the whole batch."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.layers.append(layer)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q.double(), keys) * options.scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype).contiguous()


class DecoderConformance:
    """The suite. Subclass it and implement `make_kernels`."""

    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[dict[torch.dtype, float]] = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.005}
    """Largest root mean square error of the logits, relative to their own."""

    def make_kernels(self) -> DecoderKernels:
        raise NotImplementedError

    @pytest.mark.parametrize("num_tokens", [1, 7, 200])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_logits_are_those_of_the_formula(self, case: Case, num_tokens: int) -> None:
        for dtype in self.dtypes:
            weights = make_weights(case, dtype, self.device)
            batch = make_batch(case.shape, num_tokens, self.device)
            attention, kernels = BatchAttention(), self.make_kernels()
            assert kernels.unsupported_reasons(case.shape, dtype) == []
            found = kernels.build(_taken(weights)).forward(batch, attention)
            assert attention.layers == list(range(case.shape.num_layers))
            assert found.shape == (batch.logit_rows.shape[0], case.shape.vocab_size)
            expected = run_formula(weights, batch)
            error = (found.double() - expected).norm() / expected.norm()
            assert error <= self.tolerance[dtype], f"{dtype}: {float(error):.2g}"

    def test_rows_are_given_in_the_order_asked_for_and_none_if_none_is(self) -> None:
        case, dtype = CASES[0], self.dtypes[0]
        weights, batch = make_weights(case, dtype, self.device), make_batch(case.shape, 5, self.device)
        decoder = self.make_kernels().build(_taken(weights))
        everything = decoder.forward(_with_rows(batch, [0, 1, 2, 3, 4]), BatchAttention()).clone()
        some = decoder.forward(_with_rows(batch, [3, 0]), BatchAttention())
        torch.testing.assert_close(some, everything[[3, 0]], rtol=1e-4, atol=1e-4)
        assert decoder.forward(_with_rows(batch, []), BatchAttention()).shape == (0, case.shape.vocab_size)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights, which can be read several times."""

    case: Case
    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor
    head: Projection | None


def make_weights(case: Case, dtype: torch.dtype, device: str = "cpu") -> Weights:
    """Makes random weights, the same at each call."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype).to(device)

    def project(out_features: int, in_features: int) -> Projection:
        bias = draw(out_features) if case.has_biases else None
        return Projection(draw(out_features, in_features, scale=in_features**-0.5), bias)

    def norm(size: int) -> torch.Tensor:
        return 1 + draw(size, scale=0.2).float()

    shape, spec = case.shape, case.shape.attention
    rotary = _make_rotary(int(spec.head_dim * case.rotated_share), device)
    layers = tuple(
        DecoderLayer(
            input_norm=norm(shape.hidden_size),
            qkv=project((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, shape.hidden_size),
            attention_output=project(shape.hidden_size, spec.num_heads * spec.head_dim),
            feed_forward_norm=norm(shape.hidden_size),
            gate_up=project(2 * shape.intermediate_size, shape.hidden_size),
            down=project(shape.hidden_size, shape.intermediate_size),
            rotary=rotary,
            options=AttentionOptions(scale=spec.head_dim**-0.5),
            query_norm=norm(spec.head_dim) if case.has_head_norms else None,
            key_norm=norm(spec.head_dim) if case.has_head_norms else None,
            attention_output_norm=norm(shape.hidden_size) if case.has_output_norms else None,
            feed_forward_output_norm=norm(shape.hidden_size) if case.has_output_norms else None,
        )
        for _ in range(shape.num_layers)
    )
    head = None if case.is_tied else Projection(draw(shape.vocab_size, shape.hidden_size, scale=0.2))
    return Weights(case, draw(shape.vocab_size, shape.hidden_size), layers, norm(shape.hidden_size), head)


def make_batch(shape: DecoderShape, num_tokens: int, device: str = "cpu") -> ModelInput:
    """Makes a batch of tokens at unordered positions; asks for logits of the last one, and of some others if many."""
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randint(shape.vocab_size, (num_tokens,), generator=generator)
    positions = torch.randperm(MAX_POSITIONS, generator=generator)[:num_tokens]
    rows = torch.arange(num_tokens - 1, -1, -3)
    return ModelInput(tokens.to(device), positions.to(device), rows.to(device))


def run_formula(weights: Weights, batch: ModelInput) -> torch.Tensor:
    """[num_rows, vocab_size] float64."""
    shape, attention = weights.case.shape, BatchAttention()
    x = weights.embedding.double()[batch.token_ids] * shape.embedding_scale
    for index, layer in enumerate(weights.layers):
        x = x + _attention_product(shape, layer, index, x, batch, attention)
        gate, up = _project(_norm(x, layer.feed_forward_norm, shape), layer.gate_up).chunk(2, dim=-1)
        product = _project(_activate(shape, gate) * up, layer.down)
        x = x + _norm(product, layer.feed_forward_output_norm, shape)
    head = weights.head or Projection(weights.embedding)
    logits = _project(_norm(x[batch.logit_rows], weights.final_norm, shape), head)
    cap = shape.logits_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _attention_product(
    shape: DecoderShape,
    layer: DecoderLayer,
    index: int,
    x: torch.Tensor,
    batch: ModelInput,
    attention: BatchAttention,
) -> torch.Tensor:
    spec = shape.attention
    heads = _project(_norm(x, layer.input_norm, shape), layer.qkv).view(len(x), -1, spec.head_dim)
    first_value = spec.num_heads + spec.num_kv_heads
    q, k, v = heads[:, : spec.num_heads], heads[:, spec.num_heads : first_value], heads[:, first_value:]
    q, k = _norm(q, layer.query_norm, shape), _norm(k, layer.key_norm, shape)
    q, k = (_rotate(heads, layer.rotary, batch.positions) for heads in (q, k))
    output = attention.attend(index, q, k, v, layer.options).flatten(1)
    return _norm(_project(output, layer.attention_output), layer.attention_output_norm, shape)


def _project(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    bias = None if projection.bias is None else projection.bias.double()
    return torch.nn.functional.linear(x, projection.weight.double(), bias)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, shape: DecoderShape) -> torch.Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.norm_eps) * weight.double()


def _activate(shape: DecoderShape, x: torch.Tensor) -> torch.Tensor:
    if shape.activation == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if shape.activation == "gelu_tanh" else "none")


def _rotate(heads: torch.Tensor, rotary: Rotary | None, positions: torch.Tensor) -> torch.Tensor:
    if rotary is None:
        return heads
    cos, sin = (table.double()[positions][:, None] for table in (rotary.cos, rotary.sin))
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _make_rotary(num_channels: int, device: str) -> Rotary | None:
    if not num_channels:
        return None
    frequencies = 1000.0 ** (-torch.arange(0, num_channels, 2).float() / num_channels)
    angles = torch.arange(MAX_POSITIONS).float()[:, None] * frequencies
    return Rotary(angles.cos().to(device), angles.sin().to(device))


def _taken(weights: Weights) -> DecoderWeights:
    layers: Iterator[DecoderLayer] = iter(weights.layers)
    return DecoderWeights(weights.case.shape, weights.embedding, layers, weights.final_norm, weights.head)


def _with_rows(batch: ModelInput, rows: Sequence[int]) -> ModelInput:
    return replace(batch, logit_rows=torch.tensor(rows, dtype=torch.int64, device=batch.token_ids.device))
