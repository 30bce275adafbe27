"""Runs a tiny forward at load to find out how a model's layers call the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pagedkv.plugin.attention_metadata import AttentionOptions
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec

from .attention import CONTEXT_KEYWORD

_NUM_PROBE_TOKENS = 3


@dataclass(slots=True)
class AttentionRecorder:
    """Replaces an AttentionContext and records the calls. Returns zeros."""

    calls: list[tuple[int, AttentionSpec]] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        spec = AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            has_sinks=options.sinks is not None,
            has_alibi=options.alibi_slopes is not None,
        )
        self.calls.append((layer, spec))
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def probe_layers(model: torch.nn.Module, spec: ModelSpec) -> ModelSpec:
    """Runs three tokens through the model.

    Returns:
        The spec with its layers' heads, dims, windows, soft caps and sinks as in the calls.

    Raises:
        UnsupportedError: a layer did not call exactly once with its own index, or used something unsupported.
    """
    recorder = AttentionRecorder()
    device = next(model.parameters()).device
    positions = torch.arange(_NUM_PROBE_TOKENS, device=device)
    arguments: dict[str, Any] = {CONTEXT_KEYWORD: recorder}
    try:
        model(
            input_ids=positions.remainder(spec.vocab_size)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[:1],
            **arguments,
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{spec.architecture} can't be served from a paged cache: {error}") from error
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"{spec.architecture} can't be served from a paged cache: a flattened batch fails in it "
            f"({type(error).__name__}: {error})"
        ) from error
    _check_calls(spec, [layer for layer, _ in recorder.calls])
    layers = tuple(layer for _, layer in sorted(recorder.calls, key=lambda call: call[0]))
    _check_windows(spec, layers)
    return replace(spec, layers=layers)


def _check_calls(spec: ModelSpec, called: Sequence[int]) -> None:
    expected = range(len(spec.layers))
    faults = [f"layer {layer} called {called.count(layer)} times" for layer in expected if called.count(layer) != 1]
    faults += [f"an unknown layer {layer} called" for layer in sorted(set(called) - set(expected))]
    if faults:
        raise UnsupportedError(
            f"{spec.architecture} can't be served from a paged cache: each of its {len(spec.layers)} layers must call "
            f"transformers' attention interface once, but {'; '.join(faults)}"
        )


def _check_windows(spec: ModelSpec, layers: Sequence[AttentionSpec]) -> None:
    for index, (described, called) in enumerate(zip(spec.layers, layers, strict=True)):
        if described.sliding_window is not None and called.sliding_window is None:
            raise UnsupportedError(
                f"{spec.architecture} can't be served from a paged cache: layer {index} keeps its sliding window of "
                f"{described.sliding_window} tokens in a mask and does not tell the attention function"
            )
        if called.num_heads % called.num_kv_heads:
            raise UnsupportedError(
                f"{spec.architecture}: layer {index} has {called.num_heads} query heads, no multiple of its "
                f"{called.num_kv_heads} KV heads"
            )
