"""The dtype of a checkpoint whose config.json states none, and 16-bit floats that a CPU does not compute with."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv.adapters.transformers.description import find_dtype
from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.adapters.transformers.weight_files import list_weight_files, read_stored_dtype
from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.resolved_config import ModelSettings

SaveModel = Callable[..., Path]


def settings_of(path: Path) -> ModelSettings:
    return ModelSettings(str(path), "transformers", "", trust_remote_code=False, allow_pickle=False)


def save_as(source: Path, dtype: torch.dtype, max_shard_size: str = "1GB", stated: object = None) -> Path:
    """Saves the model in another dtype in its own place; config.json then states `stated`, or nothing."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(source, max_shard_size=max_shard_size)
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps({**config, **({} if stated is None else {"dtype": stated})}))
    return source


def describe_dtype(model: Path) -> torch.dtype:
    return TransformersModel.describe(settings_of(model)).dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dtype_that_the_config_does_not_state_is_that_of_the_weights(
    save_tiny_llama: SaveModel, dtype: torch.dtype
) -> None:
    model = save_as(save_tiny_llama(num_hidden_layers=1), dtype)
    assert describe_dtype(model) == dtype
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": None}))
    assert describe_dtype(model) == dtype


def test_a_stated_dtype_wins_over_that_of_the_weights(save_tiny_llama: SaveModel) -> None:
    assert describe_dtype(save_as(save_tiny_llama(num_hidden_layers=1), torch.float32, stated="bfloat16")) == (
        torch.bfloat16
    )


def test_the_headers_of_all_files_of_the_index_count_and_of_no_others(save_tiny_llama: SaveModel) -> None:
    model = save_as(save_tiny_llama(num_hidden_layers=1), torch.bfloat16, max_shard_size="100KB")
    assert len(list_weight_files(settings_of(model))) > 1
    save_file({"a": torch.zeros(10_000_000), "b": torch.zeros(3, dtype=torch.int8)}, model / "consolidated.safetensors")
    assert describe_dtype(model) == torch.bfloat16


def test_most_weights_decide_where_dtypes_are_mixed(save_tiny_llama: SaveModel) -> None:
    model = save_as(save_tiny_llama(num_hidden_layers=1), torch.float32)
    weights = {
        "norm": torch.zeros(64),
        "weight": torch.zeros(64, 64, dtype=torch.bfloat16),
        "ids": torch.zeros(9999, dtype=torch.int64),
    }
    save_file(weights, model / "model.safetensors")
    assert describe_dtype(model) == torch.bfloat16


@pytest.mark.parametrize("content", [None, b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_float32_is_taken_where_nothing_states_a_dtype_and_the_log_says_so(
    save_tiny_llama: SaveModel, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    model = save_as(save_tiny_llama(num_hidden_layers=1), torch.bfloat16)
    (model / "model.safetensors").unlink()
    if content is not None:
        (model / "model.safetensors").write_bytes(content)
    assert read_stored_dtype(settings_of(model)) is None
    assert find_dtype(AutoConfig.from_pretrained(model), settings_of(model)) == torch.float32
    assert "states no dtype" in caplog.text


def test_a_float16_checkpoint_is_served_in_bfloat16_on_a_cpu_unless_float16_is_set(
    save_tiny_llama: SaveModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    model = save_as(save_tiny_llama(num_hidden_layers=1), torch.float16, stated="float16")
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)

    def generate(**settings: str) -> tuple[torch.dtype, str, list[int]]:
        config = {"cache.num_blocks": 16, "model.device": "cpu", **{f"model.{key}": settings[key] for key in settings}}
        with Engine(model, config=config) as engine:
            [result] = engine.generate("The capital of France is", params)
            return engine.backend.info.dtype, engine.backend.info.kv_dtype.name, list(result.token_ids)

    with caplog.at_level(logging.INFO):
        converted = generate()
    assert converted[:2] == (torch.bfloat16, "bf16")
    assert [record.message for record in caplog.records if "weights are float16" in record.message] != []
    assert converted == generate(dtype="bfloat16")
    assert generate(dtype="float16")[:2] == (torch.float16, "fp16")
