"""Models on a flattened batch over a paged cache give the logits that transformers gives on its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.errors import ConfigError, UnsupportedError
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig

CPU = torch.device("cpu")
SERVED = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "smollm3", "phi3", "gpt2", "gptj",
    "gpt_neox", "opt", "mixtral", "starcoder2", "cohere", "granite", "gpt_oss", "deepseek_v3",
]  # fmt: skip
LLAMA_SHAPED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "phi3"]

TinyModel = Callable[[str], Path]
PagedModel = Callable[..., TransformersModel]
Resolve = Callable[..., ResolvedConfig]


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("name", "decoder"), [*((name, "off") for name in SERVED), *((name, "auto") for name in LLAMA_SHAPED)]
)
def test_chunks_mixed_with_decodes_give_the_dense_logits(
    name: str, decoder: str, paged_model: PagedModel, dense_model: Callable[[str], Any], paged_batch: Any
) -> None:
    model = paged_model(name, decoder)
    sequences = {"a": random_tokens(27, 1), "b": random_tokens(12, 2), "c": random_tokens(19, 3)}
    batch = paged_batch(model)
    parts = [
        batch.step({"a": sequences["a"][:10]}),
        batch.step({"a": sequences["a"][10:25], "b": sequences["b"][:9]}),
        batch.step({"a": sequences["a"][25:26], "b": sequences["b"][9:10], "c": sequences["c"][:16]}),
        batch.step({"c": sequences["c"][16:], "a": sequences["a"][26:], "b": sequences["b"][10:11]}),
        batch.step({"b": sequences["b"][11:]}),
    ]
    dense = dense_model(name)
    for sequence, token_ids in sequences.items():
        found = torch.cat([part[sequence] for part in parts if sequence in part])
        with torch.inference_mode():
            expected = dense(torch.tensor([token_ids]), use_cache=False).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_windows_and_softcaps_matter_in_these_models(
    tiny_model: TinyModel, resolved: Resolve, paged_batch: Any
) -> None:
    """The comparison above would be empty for them if the tiny models gave equal logits without."""
    for name, key, value in [
        ("mistral", "sliding_window", None),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma3", "sliding_window", 64),
    ]:
        path = tiny_model(name)
        other = path.parent / f"{name}-without-{key}"
        shutil.copytree(path, other, dirs_exist_ok=True)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        tokens = random_tokens(20, 1)
        logits = [
            paged_batch(TransformersModel.load(resolved(directory), CPU)).step({"a": tokens})["a"]
            for directory in (path, other)
        ]
        assert (logits[0] - logits[1]).abs().max() > 1e-2, name


def test_two_models_in_one_process_keep_apart(paged_model: PagedModel, paged_batch: Any) -> None:
    """Interleaved steps of two engines: neither sees the other's cache."""
    alone = []
    tokens = random_tokens(16, 5)
    for name in ("llama", "qwen3"):
        batch = paged_batch(paged_model(name))
        alone.append([batch.step({"a": chunk})["a"] for chunk in (tokens[:9], tokens[9:])])
    batches = [paged_batch(paged_model(name)) for name in ("llama", "qwen3")]
    interleaved = [[batch.step({"a": chunk})["a"] for batch in batches] for chunk in (tokens[:9], tokens[9:])]
    for model_index in range(2):
        for chunk_index in range(2):
            torch.testing.assert_close(interleaved[chunk_index][model_index], alone[model_index][chunk_index])


def test_logits_come_for_the_rows_asked_for_alone(paged_model: PagedModel, paged_batch: Any) -> None:
    model = paged_model("llama")
    tokens = random_tokens(11, 4)
    everything = paged_batch(model).step({"a": tokens})["a"]
    batch = paged_batch(model)
    span = batch._extend("a", 11)
    context = batch._context(["a"], {"a": span})
    for rows in ([10], [2, 7], []):
        part = ModelInput(torch.tensor(tokens), torch.arange(11), torch.tensor(rows, dtype=torch.int64))
        logits = model.forward(part, context)
        assert logits.shape == (len(rows), 96)
        torch.testing.assert_close(logits, everything[rows])


def test_is_found_as_a_plugin_that_fits_the_interface() -> None:
    assert load_plugin(MODELS, "transformers") is TransformersModel


@pytest.mark.parametrize("name", SERVED)
def test_the_description_agrees_with_the_loaded_model(
    name: str, tiny_model: TinyModel, paged_model: PagedModel, resolved: Resolve
) -> None:
    described = TransformersModel.describe(resolved(tiny_model(name)).model)
    model = paged_model(name, "off")
    assert described == model.spec
    assert model._model is not None
    assert described.num_parameters == sum(parameter.numel() for parameter in model._model.parameters())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stablelm", "StableLmForCausalLM.* drops the keyword"),
        ("falcon", "FalconForCausalLM has attention of its own"),
        ("gpt_neo", "GPTNeoForCausalLM has attention of its own"),
        ("bloom", r"BloomForCausalLM.*layer 0 called 0 times; layer 1 called 0 times"),
        ("qwen2_moe", "Qwen2MoeForCausalLM.* sliding window of 6 tokens in a mask"),
        ("bert", "BertLMHeadModel.* looks ahead"),
    ],
)
def test_a_model_whose_layers_miss_the_context_is_refused_by_name(
    name: str, reason: str, tiny_model: TinyModel, resolved: Resolve
) -> None:
    config = resolved(tiny_model(name))
    with pytest.raises(UnsupportedError, match=reason):
        TransformersModel.load(config, CPU)


def test_weights_that_lack_a_parameter_are_refused_instead_of_made_up(
    tiny_model: TinyModel, resolved: Resolve, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj\.weight missing"):
        TransformersModel.load(resolved(tmp_path), CPU)


def test_pickled_weights_load_only_when_allowed(tiny_model: TinyModel, resolved: Resolve, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.allow_pickle"):
        TransformersModel.load(resolved(tmp_path), CPU)
    model = TransformersModel.load(resolved(tmp_path, model={"allow_pickle": True}), CPU)
    assert len(model.spec.layers) == 3


def test_loading_leaves_the_logging_of_transformers_as_it_was(tiny_model: TinyModel, resolved: Resolve) -> None:
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    TransformersModel.load(resolved(tiny_model("llama")), CPU)
    assert transformers_logging.get_verbosity() == transformers_logging.INFO
    assert transformers_logging.is_progress_bar_enabled()


def test_loading_is_silent(tiny_model: TinyModel, resolved: Resolve, capfd: pytest.CaptureFixture[str]) -> None:
    config = resolved(tiny_model("llama"))
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()
    capfd.readouterr()
    TransformersModel.load(config, CPU)
    assert capfd.readouterr() == ("", "")


def test_the_dtype_asked_for_is_the_models(tiny_model: TinyModel, resolved: Resolve) -> None:
    model = TransformersModel.load(resolved(tiny_model("llama"), model={"dtype": "bfloat16", "decoder": "off"}), CPU)
    assert model.spec.dtype == torch.bfloat16
    assert model._model is not None
    assert {parameter.dtype for parameter in model._model.parameters()} == {torch.bfloat16}
    assert dataclasses.replace(model.spec, dtype=torch.float32) == TransformersModel.describe(
        resolved(tiny_model("llama")).model
    )
