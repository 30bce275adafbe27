"""Recognizes a Llama-shaped model by its modules and passes it to decoder kernels.

There is no table of model names. Modules must have the names of Llama's; a model with unknown parameters is refused;
and the fused decoder is used only if its logits of a few tokens equal those of the modules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pagedkv.plugin.attention_metadata import AttentionOptions
from pagedkv.plugin.decoder import (
    Activation,
    Decoder,
    DecoderKernels,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    Projection,
    Rotary,
)
from pagedkv.plugin.features import find_missing_features
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.model_spec import ModelSpec

from .attention import CONTEXT_KEYWORD
from .dense_attention import DenseAttention

logger = logging.getLogger(__name__)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
_MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.02}
"""Largest error of the logits relative to their root mean square: several times the rounding error of a right model."""
_NUM_CHECKED_TOKENS = 12


class NotLlamaShapedError(Exception):
    """A model does not have Llama's shape; the message says what is different."""


class DecoderMismatchError(Exception):
    """A decoder's logits differ from those of the modules whose weights it has."""


def build_fused_decoder(model: Any, spec: ModelSpec, kernels: DecoderKernels) -> Decoder | None:
    """Moves the model's weights into a decoder.

    Args:
        model: a causal language model of transformers. Its layers are empty afterwards, unless None is returned.

    Returns:
        None, with the reason in the log, if the model must run through its modules.

    Raises:
        DecoderMismatchError: the decoder's logits differ; the model's layers are empty by then.
    """
    try:
        shape = read_shape(model, spec)
        missing = find_missing_features(kernels, shape.attention.features)
        reasons = [f"the decoder kernels do not name the feature {name!r}" for name in missing]
        reasons = reasons or kernels.unsupported_reasons(shape, spec.dtype)
    except NotLlamaShapedError as fault:
        reasons = [str(fault)]
    if reasons:
        logger.info("%s runs as transformers' modules do: %s", spec.architecture, "; ".join(reasons))
        return None
    batch, dense = _checked_batch(model, spec), DenseAttention()
    expected = _run_modules(model, batch, dense)
    decoder = kernels.build(read_weights(model, shape, spec, dense.options))
    difference = _relative_error(decoder.forward(batch, DenseAttention()), expected)
    if not difference <= _MAX_ERROR[spec.dtype]:
        raise DecoderMismatchError(f"the logits of {spec.architecture} differ by {difference:.2g} of their size")
    logger.info("%s runs on the decoder kernels %s", spec.architecture, kernels.name)
    return decoder


def read_shape(model: Any, spec: ModelSpec) -> DecoderShape:
    """Reads a model's shape. Raises NotLlamaShapedError."""
    config = model.config
    layers = _find(_find(model, "model"), "layers")
    attention = spec.layers[0]
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in spec.layers}) > 1:
        raise NotLlamaShapedError("its layers have heads of different numbers or sizes")
    if any(layer.has_sinks or layer.has_alibi for layer in spec.layers):
        raise NotLlamaShapedError("its attention has sinks or slopes")
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in _ACTIVATIONS:
        raise NotLlamaShapedError(f"its activation is {activation}")
    multipliers = [name for name in _MULTIPLIERS if getattr(config, name, None) not in (None, 1.0)]
    if multipliers:
        raise NotLlamaShapedError(f"it has a factor of its own: {', '.join(multipliers)}")
    for layer in layers:
        _refuse_unknown_parameters(layer)
    return DecoderShape(
        attention=attention,
        num_layers=len(layers),
        hidden_size=_find(config, "hidden_size"),
        intermediate_size=_find(layers[0], "mlp.down_proj").weight.shape[1],
        vocab_size=spec.vocab_size,
        activation=_ACTIVATIONS[activation],
        norm_eps=_find(config, "rms_norm_eps"),
        embedding_scale=_embedding_scale(model),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


def count_table_bytes(model: Any, spec: ModelSpec) -> int:
    """Bytes of the tables that decoder kernels keep in addition to the weights; 0 if the model is not Llama-shaped.

    Args:
        model: may be on the meta device.
    """
    try:
        read_shape(model, spec)
    except NotLlamaShapedError:
        return 0
    rotaries: dict[str, Rotary] = {}
    for layer in model.model.layers:
        _rotary(model, layer, spec, rotaries)
    return sum(rotary.cos.nbytes + rotary.sin.nbytes for rotary in rotaries.values())


def read_weights(
    model: Any, shape: DecoderShape, spec: ModelSpec, options: Mapping[int, AttentionOptions]
) -> DecoderWeights:
    """Reads the weights in the form of decoder kernels. A layer's modules are emptied after it was read."""
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings()
    is_tied = head.weight.data_ptr() == embedding.data_ptr() and head.bias is None
    return DecoderWeights(
        shape=shape,
        embedding=embedding,
        layers=_take_layers(model, shape, spec, options),
        final_norm=_norm_weight(model.model.norm, shape.hidden_size, shape.norm_eps),
        head=None if is_tied else _projection(head),
    )


def _take_layers(
    model: Any, shape: DecoderShape, spec: ModelSpec, options: Mapping[int, AttentionOptions]
) -> Iterator[DecoderLayer]:
    rotaries: dict[str, Rotary] = {}
    for index, layer in enumerate(model.model.layers):
        yield _read_layer(model, layer, shape, options[index], _rotary(model, layer, spec, rotaries))
        for parameter in layer.parameters():
            parameter.data = parameter.data.new_empty(0)


def _read_layer(
    model: Any, layer: Any, shape: DecoderShape, options: AttentionOptions, rotary: Rotary | None
) -> DecoderLayer:
    attention, mlp, size, eps = layer.self_attn, layer.mlp, shape.hidden_size, shape.norm_eps
    has_output_norms = hasattr(layer, "pre_feedforward_layernorm")
    before_feed_forward = layer.pre_feedforward_layernorm if has_output_norms else layer.post_attention_layernorm
    return DecoderLayer(
        input_norm=_norm_weight(layer.input_layernorm, size, eps),
        qkv=_joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        attention_output=_projection(attention.o_proj),
        feed_forward_norm=_norm_weight(before_feed_forward, size, eps),
        gate_up=_joined(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_projection(mlp.down_proj),
        rotary=rotary,
        options=options,
        query_norm=_optional_norm(attention, "q_norm", shape),
        key_norm=_optional_norm(attention, "k_norm", shape),
        attention_output_norm=_norm_weight(layer.post_attention_layernorm, size, eps) if has_output_norms else None,
        feed_forward_output_norm=_norm_weight(layer.post_feedforward_layernorm, size, eps)
        if has_output_norms
        else None,
    )


_KNOWN_MODULES = {
    *("self_attn." + name for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")),
    *("mlp." + name for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def _refuse_unknown_parameters(layer: torch.nn.Module) -> None:
    modules = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    unknown = sorted(modules - _KNOWN_MODULES)
    if unknown:
        raise NotLlamaShapedError(f"its layers have parameters of {', '.join(unknown[:3])}")
    for required in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
        if required not in modules:
            raise NotLlamaShapedError(f"its layers have no {required}")


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        if not hasattr(module, name):
            raise NotLlamaShapedError(f"it has no {path}")
        module = getattr(module, name)
    return module


def _projection(linear: Any) -> Projection:
    return Projection(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _joined(module: Any, joined: str, parts: tuple[str, ...]) -> Projection:
    """Returns one joined projection, whether the model has it joined or in parts."""
    if hasattr(module, joined):
        return _projection(getattr(module, joined))
    linears = [_projection(_find(module, part)) for part in parts]
    biases = [linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    has_bias = any(linear.bias is not None for linear in linears)
    return Projection(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if has_bias else None)


def _optional_norm(attention: Any, name: str, shape: DecoderShape) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else _norm_weight(norm, shape.attention.head_dim, shape.norm_eps)


def _norm_weight(norm: Any, size: int, eps: float) -> torch.Tensor:
    """Returns the factors of a norm, [size] float32, whether the module adds 1 to its weights or not."""
    if tuple(norm.weight.shape) != (size,):
        raise NotLlamaShapedError(f"a norm has {tuple(norm.weight.shape)} weights, not {size}")
    ones = torch.ones(size, device=norm.weight.device)
    weight: torch.Tensor = norm(ones).detach().float() * (1.0 + eps) ** 0.5
    return weight


def _embedding_scale(model: Any) -> float:
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))


def _rotary(model: Any, layer: Any, spec: ModelSpec, known: dict[str, Rotary]) -> Rotary | None:
    """Returns the tables of a layer's kind in float32, made once for each kind by the model's own module."""
    if not getattr(layer.self_attn, "use_rope", True):
        return None
    kinds = getattr(model.config, "layer_types", None) or []
    parameters = getattr(model.config, "rope_parameters", None) or {}
    is_by_kind = any(isinstance(value, Mapping) for value in parameters.values())
    kind = kinds[layer.self_attn.layer_idx] if is_by_kind and kinds else ""
    if kind not in known:
        module = _find(model.model, "rotary_emb")
        device = model.get_input_embeddings().weight.device
        positions = torch.arange(spec.max_position_tokens, device=device)[None]
        tables = module(torch.empty(0, dtype=torch.float32, device=device), positions, *((kind,) if kind else ()))
        # Each angle is in both halves.
        cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in tables)
        known[kind] = Rotary(cos, sin)
    return known[kind]


def _checked_batch(model: Any, spec: ModelSpec) -> ModelInput:
    """Makes a batch of tokens far apart in the vocabulary, at positions far apart."""
    device = model.get_input_embeddings().weight.device
    places = torch.arange(_NUM_CHECKED_TOKENS, device=device)
    last = min(spec.max_position_tokens - 1, 2**14)
    positions = torch.linspace(0, last**0.5, _NUM_CHECKED_TOKENS, device=device).square().long().clamp(max=last)
    return ModelInput((places * 7919 + 1) % spec.vocab_size, torch.maximum(positions, places).clamp(max=last), places)


def _run_modules(model: Any, batch: ModelInput, attention: DenseAttention) -> torch.Tensor:
    arguments = {CONTEXT_KEYWORD: attention}
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=batch.logit_rows,
        **arguments,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((logits.float() - expected).norm() / expected.norm())
