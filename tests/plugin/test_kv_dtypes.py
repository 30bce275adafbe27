"""Bytes of a block in every KV dtype, and the register of their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedkv.plugin.errors import ConfigError, PluginError
from pagedkv.plugin.kv_dtypes import (
    BF16,
    KV_DTYPE_OF_TORCH,
    KVCacheSpec,
    KVDtype,
    ScaleGranularity,
    find_kv_dtype,
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
            ),
            2 * (16 * (32 + 32) + (64 + 16) * 2),
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


def test_a_name_is_taken_once() -> None:
    assert register_kv_dtype(replace(BF16)) == BF16
    with pytest.raises(PluginError, match="'bf16' is registered twice"):
        register_kv_dtype(replace(BF16, bits=8))


def test_a_models_own_dtype_has_a_kv_dtype_that_keeps_it() -> None:
    for torch_dtype, kv_dtype in KV_DTYPE_OF_TORCH.items():
        assert kv_dtype.storage == torch_dtype
        assert not kv_dtype.is_quantized
