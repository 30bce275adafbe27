"""Which models run on decoder kernels, and that they are believed only when they compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.attention_metadata import LayerAttention
from pagedkv.plugin.decoder import Decoder, DecoderShape, DecoderWeights
from pagedkv.plugin.errors import PluginError
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.resolved_config import ResolvedConfig

CPU = torch.device("cpu")
Resolve = Callable[..., ResolvedConfig]
TinyModel = Callable[[str], Path]
PagedModel = Callable[..., TransformersModel]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"])
def test_models_of_the_shape_run_on_the_decoder_kernels(
    name: str, tiny_model: TinyModel, resolved: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = TransformersModel.load(resolved(tiny_model(name)), CPU)
    assert model._decoder is not None
    assert model._model is None
    assert "runs on the decoder kernels cpu" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_moe", "its layers have parameters of mlp"),
        ("gpt2", "it has no model"),
        ("starcoder2", "its layers have parameters of mlp.c_"),
        ("gpt_oss", "its attention has sinks or slopes"),
        ("cohere", "it has a factor of its own: logit_scale"),
    ],
)
def test_other_models_run_as_their_modules_do_and_the_log_says_why(
    name: str, reason: str, tiny_model: TinyModel, resolved: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = TransformersModel.load(resolved(tiny_model(name)), CPU)
    assert model._decoder is None
    assert model._model is not None
    assert reason in caplog.text


def test_off_and_unknown_kernels(tiny_model: TinyModel, resolved: Resolve) -> None:
    assert TransformersModel.load(resolved(tiny_model("llama"), model={"decoder": "off"}), CPU)._decoder is None
    with pytest.raises(PluginError, match="unknown decoder kernels 'cpuu'; did you mean 'cpu'"):
        TransformersModel.load(resolved(tiny_model("llama"), model={"decoder": "cpuu"}), CPU)


class WrongKernels:
    """Its decoders compute nothing that the model does."""

    interface_version: ClassVar[int] = 1
    name = "wrong"

    @classmethod
    def create(cls, device: torch.device) -> WrongKernels:
        return cls()

    def unsupported_reasons(self, shape: DecoderShape, dtype: torch.dtype) -> list[str]:
        return []

    def build(self, weights: DecoderWeights) -> Decoder:
        layers = list(weights.layers)

        class Zeros:
            def forward(self, batch: ModelInput, attention: LayerAttention) -> torch.Tensor:
                assert len(layers) == weights.shape.num_layers
                return torch.zeros(batch.logit_rows.shape[0], weights.shape.vocab_size)

        return Zeros()


def test_kernels_that_compute_something_else_are_not_used(
    tiny_model: TinyModel,
    resolved: Resolve,
    paged_batch: Any,
    paged_model: PagedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pagedkv.adapters.transformers.paged_model.create_plugin", lambda *_: WrongKernels())
    model = TransformersModel.load(resolved(tiny_model("llama")), CPU)
    monkeypatch.undo()
    assert "the decoder kernels wrong are not used" in caplog.text
    tokens = {"a": [5, 9, 11, 40]}
    found = paged_batch(model).step(tokens)["a"]
    torch.testing.assert_close(found, paged_batch(paged_model("llama", "off")).step(tokens)["a"])


def test_tables_follow_the_models_own_scaling(tmp_path: Path, resolved: Resolve) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                         "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert TransformersModel.load(resolved(tmp_path), CPU)._decoder is not None


@pytest.mark.parametrize("name", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_factors_that_the_formula_lacks_refuse_a_model(
    name: str, tmp_path: Path, resolved: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = transformers.GraniteConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, **{name: 1.5}
    )
    transformers.GraniteForCausalLM(config).save_pretrained(tmp_path)
    assert TransformersModel.load(resolved(tmp_path), CPU)._decoder is None
    assert f"it has a factor of its own: {name}" in caplog.text
