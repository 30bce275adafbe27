"""Scales that checkpoints bring: under which names, for which KV dtype."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.adapters.transformers.kv_scales import describe_kv_scales, load_checkpoint_scales
from pagedkv.plugin.resolved_config import ModelSettings

NAMES = {
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "of the projection": "model.layers.{}.self_attn.{side}_proj.{}_scale",
    "of a module of their own": "transformer.layers.{}.attn.attn.{}_scale",
}


def make_settings(folder: Path) -> ModelSettings:
    return ModelSettings(str(folder), "transformers", "", trust_remote_code=False, allow_pickle=False)


def write_checkpoint(folder: Path, pattern: str | None) -> ModelSettings:
    """Two shards of weights, one layer's scales in each."""
    (folder / "config.json").write_text("{}")
    for layer in range(2):
        tensors = {f"model.layers.{layer}.self_attn.k_proj.weight": torch.zeros(2, 2)}
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight_scale"] = torch.ones(1)
        for index, side in enumerate("kv"):
            if pattern:
                tensors[pattern.format(layer, side, side=side)] = torch.tensor([10.0 * layer + index + 1])
        save_file(tensors, folder / f"model-0000{layer + 1}-of-00002.safetensors")
    return make_settings(folder)


@pytest.mark.parametrize("pattern", NAMES.values(), ids=NAMES)
def test_scales_are_found_by_their_names(tmp_path: Path, pattern: str) -> None:
    settings = write_checkpoint(tmp_path, pattern)
    found = {name: tensor.item() for name, tensor in load_checkpoint_scales(settings).items()}
    assert found == {
        "layers.0.k_scale": 1.0,
        "layers.0.v_scale": 2.0,
        "layers.1.k_scale": 11.0,
        "layers.1.v_scale": 12.0,
    }


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    settings = write_checkpoint(tmp_path, None)
    assert load_checkpoint_scales(settings) == {}
    assert describe_kv_scales(settings, SimpleNamespace()) is None


class Quantization:
    """transformers gives some quantization configs as objects."""

    def __init__(self, scheme: dict[str, Any]) -> None:
        self._scheme = scheme

    def to_dict(self) -> dict[str, Any]:
        return {"kv_cache_scheme": self._scheme}


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [
        (None, "fp8_e4m3"),
        ({"quant_method": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8_e4m3"),
        (Quantization({"num_bits": 8, "type": "int"}), "int8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, None),
    ],
)
def test_the_scheme_says_which_kv_dtype_they_are_for(tmp_path: Path, quantization: Any, kv_dtype: str | None) -> None:
    settings = write_checkpoint(tmp_path, NAMES["compressed-tensors"])
    assert describe_kv_scales(settings, SimpleNamespace(quantization_config=quantization)) == kv_dtype
