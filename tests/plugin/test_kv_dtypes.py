"""Bytes of a block in every KV dtype, and the register of their names."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

from pagedkv.plugin import kv_dtypes
from pagedkv.plugin.errors import ConfigError, PluginError
from pagedkv.plugin.kv_dtypes import (
    BF16,
    FP16,
    KV_DTYPE_OF_TORCH,
    KVCacheSpec,
    KVDtype,
    ScaleGranularity,
    find_kv_dtype,
    find_static_variant,
    known_kv_dtypes,
    register_kv_dtype,
)
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec


def bytes_per_block(dtype: KVDtype, head_dim: int = 64, v_head_dim: int = 64, block_size: int = 16) -> int:
    return KVCacheSpec(2, head_dim, v_head_dim, block_size, dtype).bytes_per_block


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        (KVDtype("a", 32, torch.float32), 2 * 16 * (64 + 64) * 4),
        (KVDtype("b", 16, torch.bfloat16), 2 * 16 * (64 + 64) * 2),
        (KVDtype("c", 8, torch.float8_e4m3fn, key_scales=ScaleGranularity.STATIC), 2 * 16 * (64 + 64)),
        (
            KVDtype("d", 8, torch.int8, key_scales=ScaleGranularity.TOKEN, value_scales=ScaleGranularity.TOKEN),
            2 * (16 * (64 + 64) + (16 + 16) * 4),
        ),
        (
            KVDtype(
                "e",
                4,
                torch.uint8,
                key_scales=ScaleGranularity.CHANNEL,
                value_scales=ScaleGranularity.TOKEN,
                scale_dtype=torch.float16,
                zero_dtype=torch.int8,
            ),
            2 * (16 * (32 + 32) + (64 + 16) * 3),
        ),
        (
            KVDtype(
                "f",
                4,
                torch.uint8,
                key_scales=ScaleGranularity.TOKEN_GROUP,
                value_scales=ScaleGranularity.TOKEN_GROUP,
                scale_dtype=torch.float16,
                group_size=48,
            ),
            2 * (16 * (32 + 32) + 2 * 16 * 2 * 2),
        ),
    ],
)
def test_a_block_counts_elements_and_every_scale(dtype: KVDtype, num_bytes: int) -> None:
    assert bytes_per_block(dtype) == num_bytes


@pytest.mark.parametrize(("name", "num_bytes"), [("int8", 136), ("fp8_e4m3", 136), ("fp8_e5m2", 136), ("int4", 75)])
def test_quantized_tokens_are_as_small_as_promised(name: str, num_bytes: int) -> None:
    """Keys and values of one token and head of 64 channels; bf16 takes 256 bytes."""
    spec = KVCacheSpec(1, 64, 64, 16, find_kv_dtype(name))
    assert spec.bytes_per_token == num_bytes


def test_odd_head_dims_of_packed_elements_are_padded_to_whole_bytes() -> None:
    dtype = KVDtype("packed", 4, torch.uint8)
    assert bytes_per_block(dtype, head_dim=5, v_head_dim=7, block_size=8) == 2 * 8 * (3 + 4)


def test_a_dtype_is_quantized_when_anything_has_a_scale() -> None:
    assert not BF16.is_quantized
    assert replace(BF16, value_scales=ScaleGranularity.STATIC).is_quantized


def test_a_model_sums_its_layers() -> None:
    layers = (AttentionSpec(8, 2, 64, 64), AttentionSpec(8, 1, 64, 32))
    model = ModelSpec("Toy", torch.bfloat16, layers, 10, 8, 64, (), None, None)
    assert model.bytes_per_block(16, BF16) == 16 * 2 * (2 * 128 + 1 * 96)


def test_every_known_name_is_found_and_an_unknown_one_lists_them() -> None:
    names = known_kv_dtypes()
    assert {"bf16", "fp16", "fp32"} <= set(names)
    assert [find_kv_dtype(name).name for name in names] == names
    with pytest.raises(ConfigError, match=r"unknown KV dtype 'fp7'; known: .*bf16"):
        find_kv_dtype("fp7")


def test_a_server_of_text_generation_inference_calls_fp8_by_its_own_name() -> None:
    assert find_kv_dtype("fp8_e4m3fn") is find_kv_dtype("fp8_e4m3")


def test_static_variants_keep_the_elements_and_drop_the_scales() -> None:
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        kv_dtype, static = find_kv_dtype(name), find_static_variant(find_kv_dtype(name))
        assert static.has_static_scales
        assert static.storage == kv_dtype.storage
        assert bytes_per_block(static) == 2 * 16 * (64 + 64) < bytes_per_block(kv_dtype)
        assert find_static_variant(static) is static
    with pytest.raises(
        ConfigError, match=r"int4 takes no scales from outside; those that do: fp8_e4m3, fp8_e5m2, int8"
    ):
        find_static_variant(find_kv_dtype("int4"))


def test_an_entry_point_brings_a_kv_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_dtypes, "_KV_DTYPES", dict(kv_dtypes._KV_DTYPES))
    monkeypatch.setitem(sys.modules, "their_dtypes", types.SimpleNamespace(HALF=replace(FP16, name="half"), other=3))
    points = [
        EntryPoint("half", "their_dtypes:HALF", kv_dtypes.ENTRY_POINT_GROUP),
        EntryPoint("broken", "their_dtypes:other", kv_dtypes.ENTRY_POINT_GROUP),
        EntryPoint("absent", "no_such_module:X", kv_dtypes.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(kv_dtypes, "entry_points", lambda group: [point for point in points if point.group == group])
    assert {"half", "broken", "absent", "bf16"} <= set(known_kv_dtypes())
    assert find_kv_dtype("half").storage == torch.float16
    with pytest.raises(PluginError, match=r"'broken' \(their_dtypes:other\) names no KVDtype of this name"):
        find_kv_dtype("broken")
    with pytest.raises(PluginError, match=r"'absent' .* fails to import"):
        find_kv_dtype("absent")


def test_a_name_is_taken_once() -> None:
    assert register_kv_dtype(replace(BF16)) == BF16
    with pytest.raises(PluginError, match="'bf16' is registered twice"):
        register_kv_dtype(replace(BF16, bits=8))


def test_a_models_own_dtype_has_a_kv_dtype_that_keeps_it() -> None:
    for torch_dtype, kv_dtype in KV_DTYPE_OF_TORCH.items():
        assert kv_dtype.storage == torch_dtype
        assert not kv_dtype.is_quantized
