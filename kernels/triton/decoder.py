"""The `triton` decoder kernels: run a Llama-shaped model on a GPU, in eight launches a layer beside its attention.

torch computes the large products, over joined weights; everything between them is fused (`fused.py`). The residual
stays in float32. No code waits for the device or depends on the content of tensors, so that a CUDA graph can capture a
step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import linear

from pagedkv.kernels.triton.fused import MAX_HIDDEN_SIZE, plan_add_norm, plan_embed, plan_gate, plan_rotary
from pagedkv.kernels.triton.launch import is_interpreted, run_on
from pagedkv.kernels.triton.tuning import device_architecture
from pagedkv.plugin.attention_metadata import LayerAttention
from pagedkv.plugin.decoder import DecoderLayer, DecoderShape, DecoderWeights, Projection, Rotary
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import ModelInput

if TYPE_CHECKING:
    from typing_extensions import Self

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonDecoderKernels:
    """Implements `DecoderKernels` on a GPU and, for tests, in triton's interpreter."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def create(cls, device: torch.device) -> Self:
        """Makes the kernels. Raises UnsupportedError if they can't run on the device."""
        if not is_interpreted():
            if device.type != "cuda":
                raise UnsupportedError(f"the triton decoder kernels need a GPU; the device is {device.type}")
            device_architecture(device)
        return cls(device)

    def unsupported_reasons(self, shape: DecoderShape, dtype: torch.dtype) -> list[str]:
        reasons = []
        if dtype not in _DTYPES:
            reasons.append(f"weights of {dtype} are not implemented")
        if shape.hidden_size > MAX_HIDDEN_SIZE:
            reasons.append(f"a hidden size of {shape.hidden_size} is over {MAX_HIDDEN_SIZE}")
        if shape.attention.v_head_dim != shape.attention.head_dim:
            reasons.append("keys and values have heads of different sizes")
        return reasons

    def build(self, weights: DecoderWeights) -> TritonDecoder:
        return TritonDecoder(weights, self._device)


class TritonDecoder:
    """Runs a model with its weights."""

    def __init__(self, weights: DecoderWeights, device: torch.device) -> None:
        self._device = device
        self._shape = weights.shape
        self._embedding = weights.embedding.contiguous()
        self._layers = tuple(_with_dense_vectors(layer) for layer in weights.layers)
        self._final_norm = weights.final_norm.contiguous()
        self._head = weights.head or Projection(self._embedding)

    def forward(self, batch: ModelInput, attention: LayerAttention) -> torch.Tensor:
        x, residual = self._embed(batch)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            output = self._attend(index, layer, x, batch, attention)
            rows = None
            if index == last:
                # After the last attention tokens are independent: continue only with those that need logits.
                rows = batch.logit_rows
                output = output.index_select(0, rows)
            x, residual = self._feed_forward(index, layer, output, residual, rows)
        logits = linear(x, self._head.weight, self._head.bias)
        cap = self._shape.logits_softcap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap

    def _embed(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input and the residual: [num_tokens, hidden_size], in the model's dtype and in float32."""
        size = (batch.token_ids.shape[0], self._shape.hidden_size)
        x = self._embedding.new_empty(size)
        residual = x.new_empty(size, dtype=torch.float32)
        norm = self._layers[0].input_norm
        run_on(self._device, plan_embed(self._embedding, batch.token_ids, residual, norm, x, self._shape))
        return x, residual

    def _attend(
        self, index: int, layer: DecoderLayer, x: torch.Tensor, batch: ModelInput, attention: LayerAttention
    ) -> torch.Tensor:
        """Runs a layer's attention. Returns [num_tokens, num_heads × head_dim]."""
        spec = self._shape.attention
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias)
        rotary = plan_rotary(qkv, batch, layer, self._shape)
        if rotary is not None:
            run_on(self._device, rotary)
        heads = qkv.unflatten(1, (-1, spec.head_dim))
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return attention.attend(index, q, k, v, layer.options).flatten(1)

    def _feed_forward(
        self,
        index: int,
        layer: DecoderLayer,
        output: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of the next layer (after the last one, of the head), and the residual.

        Args:
            output: [num_rows, num_heads × head_dim].
            residual: [num_tokens, hidden_size], overwritten unless `rows` are given.
            rows: [num_rows] int64, the tokens of `output`; None means all.
        """
        product = linear(output, layer.attention_output.weight, layer.attention_output.bias)
        new_residual = residual if rows is None else product.new_empty(product.shape, dtype=torch.float32)
        x = torch.empty_like(product)
        run_on(
            self._device,
            plan_add_norm(
                residual,
                product,
                layer.attention_output_norm,
                layer.feed_forward_norm,
                x,
                self._shape,
                new_residual,
                rows,
            ),
        )
        gate_up = linear(x, layer.gate_up.weight, layer.gate_up.bias)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        run_on(self._device, plan_gate(gate_up, gated, self._shape.activation))
        product = linear(gated, layer.down.weight, layer.down.bias)
        is_last = index + 1 == len(self._layers)
        next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
        run_on(
            self._device,
            plan_add_norm(
                new_residual,
                product,
                layer.feed_forward_output_norm,
                next_norm,
                x,
                self._shape,
                None if is_last else new_residual,
            ),
        )
        return x, new_residual


def _with_dense_vectors(layer: DecoderLayer) -> DecoderLayer:
    """Returns the layer with contiguous norms and tables, as the fused kernels read them."""
    rotary = layer.rotary
    return replace(
        layer,
        input_norm=layer.input_norm.contiguous(),
        feed_forward_norm=layer.feed_forward_norm.contiguous(),
        attention_output_norm=_dense(layer.attention_output_norm),
        feed_forward_output_norm=_dense(layer.feed_forward_output_norm),
        query_norm=_dense(layer.query_norm),
        key_norm=_dense(layer.key_norm),
        rotary=None if rotary is None else Rotary(rotary.cos.contiguous(), rotary.sin.contiguous()),
    )


def _dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()
