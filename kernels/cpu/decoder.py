"""The `cpu` decoder kernels: one C call computes everything between two attentions, over weights packed once.

A Llama-shaped step is some hundred small operations a layer. Run one by one, calls and passes over memory take longer
than the arithmetic of a few rows. Weights are packed in panels of columns, in the order in which products read them: a
product of one row runs at the memory's speed, one of many rows near the processor's. The residual stays in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.kernels.cpu.compiler import CompilerError, load_library
from pagedkv.kernels.cpu.decoder_library import DecoderLibrary, LayerArgs, ModelArgs, StepArgs
from pagedkv.kernels.cpu.packing import Packer
from pagedkv.plugin.attention_metadata import AttentionOptions, LayerAttention
from pagedkv.plugin.decoder import DecoderLayer, DecoderShape, DecoderWeights
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import AttentionSpec

if TYPE_CHECKING:
    from typing_extensions import Self

_DTYPES = (torch.float32, torch.bfloat16)


class CpuDecoderKernels:
    """Implements `DecoderKernels` on CPUs for float32 and bfloat16."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "cpu"

    def __init__(self, device: torch.device, compiler_flags: tuple[str, ...] = ()) -> None:
        """Makes the kernels. `compiler_flags` are added to the native ones: tests build for other instruction sets."""
        self._device = device
        self._compiler_flags = compiler_flags

    @classmethod
    def create(cls, device: torch.device) -> Self:
        return cls(device)

    def unsupported_reasons(self, shape: DecoderShape, dtype: torch.dtype) -> list[str]:
        """See `DecoderKernels`. Compiles the library last: the first time this takes seconds."""
        reasons = []
        if self._device.type != "cpu":
            reasons.append(f"it needs a CPU, the device is {self._device.type}")
        if dtype not in _DTYPES:
            reasons.append(f"weights of {dtype} are not implemented")
        if shape.hidden_size % 2 or shape.attention.head_dim % 2:
            reasons.append(f"a hidden size of {shape.hidden_size} or head size of {shape.attention.head_dim} is odd")
        if shape.attention.v_head_dim != shape.attention.head_dim:
            reasons.append("keys and values have heads of different sizes")
        return reasons or self._library_faults()

    def build(self, weights: DecoderWeights) -> CpuDecoder:
        return CpuDecoder(weights, DecoderLibrary(load_library(self._compiler_flags, "decoder")))

    def _library_faults(self) -> list[str]:
        try:
            load_library(self._compiler_flags, "decoder")
        except CompilerError as error:
            return [str(error)]
        return []


@dataclass(slots=True)
class _Buffers:
    """Scratch memory of a step, kept between steps."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, num_bytes: int) -> int:
        """Returns the address of a buffer of at least `num_bytes` bytes."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.numel() < num_bytes:
            tensor = self.tensors[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return tensor.data_ptr()


class CpuDecoder:
    """Runs a model with packed weights. One caller at a time."""

    def __init__(self, weights: DecoderWeights, library: DecoderLibrary) -> None:
        self._library = library
        self._shape = weights.shape
        self._dtype = weights.embedding.dtype
        packer = Packer(library.panel, self._dtype)
        self._layers: list[LayerArgs] = []
        self._options: list[AttentionOptions] = []
        for layer in weights.layers:
            self._layers.append(_layer_args(packer, layer, weights.shape.attention))
            self._options.append(layer.options)
        self._model = _model_args(packer, weights, self._layers)
        self._kept = packer.tensors
        self._buffers = _Buffers()

    def forward(self, batch: ModelInput, attention: LayerAttention) -> torch.Tensor:
        spec = self._shape.attention
        # They are passed on as addresses: a column of a matrix of tokens would be read as a row.
        batch = ModelInput(batch.token_ids.contiguous(), batch.positions.contiguous(), batch.logit_rows.contiguous())
        num_tokens, num_rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        qkv = torch.empty(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=self._dtype)
        logits = torch.empty(num_rows, self._model.head.num_columns(self._library.panel))
        step = self._step_args(batch, qkv, logits)
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        layers, last = self._layers, len(self._layers) - 1
        self._library.begin(self._model, step, layers[0])
        for index, options in enumerate(self._options):
            output = attention.attend(index, q, k, v, options).contiguous()
            step.attention = output.data_ptr()
            if index < last:
                self._library.layer(self._model, step, layers[index], layers[index + 1])
        if num_rows:
            self._library.finish(self._model, step, layers[last])
        logits = logits[:, : self._shape.vocab_size]
        cap = self._shape.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _step_args(self, batch: ModelInput, qkv: torch.Tensor, logits: torch.Tensor) -> StepArgs:
        num_tokens, num_rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        num_threads = torch.get_num_threads()
        row_bytes = self._model.hidden_stride * 4
        attention_bytes = self._shape.attention.num_heads * self._shape.attention.head_dim * self._dtype.itemsize
        scratch_bytes = max(
            self._library.scratch_bytes(self._model, rows, num_threads) for rows in (num_tokens, num_rows)
        )
        return StepArgs(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            residual=self._buffers.take("residual", num_tokens * row_bytes),
            qkv=qkv.data_ptr(),
            attention=None,
            logits=logits.data_ptr(),
            last_residual=self._buffers.take("last_residual", num_rows * row_bytes),
            last_attention=self._buffers.take("last_attention", num_rows * attention_bytes),
            scratch=self._buffers.take("scratch", scratch_bytes),
            num_tokens=num_tokens,
            num_logit_rows=num_rows,
            num_threads=num_threads,
        )


def _model_args(packer: Packer, weights: DecoderWeights, layers: Sequence[LayerArgs]) -> ModelArgs:
    shape = weights.shape
    head = packer.pack(weights.embedding, None) if weights.head is None else packer.pack_projection(weights.head)
    hidden_stride = packer.round_up(shape.hidden_size)
    return ModelArgs(
        embedding=None if weights.head is None else packer.keep(weights.embedding.detach().contiguous()),
        final_norm=packer.keep_floats(weights.final_norm),
        head=head,
        hidden=shape.hidden_size,
        hidden_stride=hidden_stride,
        sums_width=max(hidden_stride, *(layer.qkv.num_columns(packer.panel) for layer in layers)),
        gated_width=max(layer.down.depth for layer in layers),
        embedding_scale=shape.embedding_scale,
        eps=shape.norm_eps,
        dtype=_DTYPES.index(weights.embedding.dtype),
        activation=("silu", "gelu_tanh", "gelu").index(shape.activation),
    )


def _layer_args(packer: Packer, layer: DecoderLayer, spec: AttentionSpec) -> LayerArgs:
    rotary = layer.rotary
    return LayerArgs(
        input_norm=packer.keep_floats(layer.input_norm),
        feed_forward_norm=packer.keep_floats(layer.feed_forward_norm),
        attention_output_norm=packer.keep_floats(layer.attention_output_norm),
        feed_forward_output_norm=packer.keep_floats(layer.feed_forward_output_norm),
        query_norm=packer.keep_floats(layer.query_norm),
        key_norm=packer.keep_floats(layer.key_norm),
        qkv=packer.pack_projection(layer.qkv),
        attention_output=packer.pack_projection(layer.attention_output),
        gate_up=packer.pack_gated(layer.gate_up),
        down=packer.pack_projection(layer.down, depth=packer.round_up_gated(layer.down.weight.shape[1])),
        cos=None if rotary is None else packer.keep_floats(rotary.cos),
        sin=None if rotary is None else packer.keep_floats(rotary.sin),
        num_rotated_pairs=0 if rotary is None else rotary.cos.shape[1],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
