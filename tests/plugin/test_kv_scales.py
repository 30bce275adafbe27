"""Static scales of keys and values: files, heads of shards, what is missing, what is unsafe."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import FP8_E4M3_STATIC
from pagedkv.plugin.kv_scales import (
    key_scale_name,
    load_kv_scales,
    pick_kv_scales,
    read_kv_scales,
    value_scale_name,
    warn_of_unsafe_scales,
)
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec

CPU = torch.device("cpu")
LAYERS = (AttentionSpec(8, 4, 64, 64),) * 3


def make_scales(num_layers: int = 3, num_heads: int = 4) -> dict[str, torch.Tensor]:
    return {
        name(layer): torch.arange(1.0, num_heads + 1) + 10 * layer + offset
        for layer in range(num_layers)
        for name, offset in ((key_scale_name, 0.0), (value_scale_name, 0.5))
    }


class Model:
    def __init__(self, scales: Mapping[str, torch.Tensor]) -> None:
        self._scales = scales

    def kv_scales(self) -> Mapping[str, torch.Tensor]:
        return self._scales


def test_a_file_holds_both_scales_of_every_layer(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    save_file(make_scales(), file, metadata={"kv_dtype": "fp8_e4m3"})
    scales = read_kv_scales(str(file), LAYERS, CPU)
    assert [k.tolist() for k, _ in scales] == [[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]]
    assert scales[0][1].tolist() == [1.5, 2.5, 3.5, 4.5]


def test_missing_layers_are_named() -> None:
    scales = make_scales()
    del scales[key_scale_name(0)], scales[value_scale_name(2)]
    with pytest.raises(ConfigError, match=r"here has no k_scale and v_scale for the layers 0, 2; .* 3 layers"):
        pick_kv_scales(scales, LAYERS, CPU, source="here")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive_numbers(bad: float) -> None:
    scales = make_scales()
    scales[value_scale_name(1)][2] = bad
    with pytest.raises(ConfigError, match=r"here: layers\.1\.v_scale has scales that are not positive"):
        pick_kv_scales(scales, LAYERS, CPU, source="here")


def test_a_number_for_a_whole_layer_is_every_heads() -> None:
    scales = {name: tensor[:1].clone() for name, tensor in make_scales().items()}
    scales[key_scale_name(1)] = torch.tensor(7.0)
    picked = pick_kv_scales(scales, LAYERS, CPU, source="here")
    assert picked[1][0].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("num_shards", "heads_a_shard", "expected"),
    [(2, 2, [[1, 2], [3, 4]]), (4, 1, [[1], [2], [3], [4]]), (8, 1, [[1], [1], [2], [2], [3], [3], [4], [4]])],
)
def test_a_shard_takes_the_scales_of_its_heads(
    num_shards: int, heads_a_shard: int, expected: list[list[float]]
) -> None:
    layers = (AttentionSpec(8, heads_a_shard, 64, 64),) * 3
    found = [
        pick_kv_scales(make_scales(), layers, CPU, source="here", shard=shard, num_shards=num_shards)[0][0].tolist()
        for shard in range(num_shards)
    ]
    assert found == expected


def test_scales_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 scales, which do not fit 4 KV heads"):
        pick_kv_scales(make_scales(num_heads=6), LAYERS, CPU, source="here")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "no header"),
        (b"not a file of tensors", "no header"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((1000).to_bytes(8, "little") + b"{}", "no header"),
    ],
)
def test_a_file_of_something_else_is_explained(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "scales.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=fault):
        read_kv_scales(str(file), LAYERS, CPU)


def test_scales_of_another_precision_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    save_file({name: tensor.half() for name, tensor in make_scales().items()}, file)
    with pytest.raises(ConfigError, match="it holds F16, not F32"):
        read_kv_scales(str(file), LAYERS, CPU)
    with pytest.raises(ConfigError, match="can't read the file of scales"):
        read_kv_scales(str(tmp_path / "absent"), LAYERS, CPU)


def test_our_reader_and_safetensors_agree_on_odd_headers(tmp_path: Path) -> None:
    """Headers are padded with spaces, and tensors need not be in the order of their names."""
    file = tmp_path / "scales.safetensors"
    scales = dict(reversed(make_scales().items()))
    header, data = {}, b""
    for name, tensor in scales.items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode() + b"   "
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert read_kv_scales(str(file), LAYERS, CPU)[2][1].tolist() == [21.5, 22.5, 23.5, 24.5]


def test_the_file_goes_before_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    save_file(make_scales(), file)
    own = Model({name: 2 * tensor for name, tensor in make_scales().items()})
    assert load_kv_scales(FP8_E4M3_STATIC, str(file), own, LAYERS, CPU)[0][0].tolist() == [1, 2, 3, 4]
    assert load_kv_scales(FP8_E4M3_STATIC, "", own, LAYERS, CPU)[0][0].tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("model", [Model({}), object()])
def test_no_scales_at_all_is_an_error_and_not_one(model: object) -> None:
    with pytest.raises(ConfigError, match=r"fp8_e4m3_static needs scales.* cache\.kv_scales"):
        load_kv_scales(FP8_E4M3_STATIC, "", model, LAYERS, CPU)


@pytest.mark.parametrize(
    ("value", "has_qk_norm", "is_warned"), [(1.0, False, True), (1.0, True, False), (0.5, False, False)]
)
def test_scales_of_one_on_unbounded_keys_are_warned_of(
    value: float, has_qk_norm: bool, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelSpec("Toy", torch.float32, LAYERS, 10, 8, 64, (), None, None, has_qk_norm=has_qk_norm)
    scales = [(torch.full((4,), value), torch.full((4,), value))] * 3
    with caplog.at_level(logging.WARNING):
        warn_of_unsafe_scales(scales, model)
    assert ("every scale of keys and values is 1.0 and Toy" in caplog.text) == is_warned
