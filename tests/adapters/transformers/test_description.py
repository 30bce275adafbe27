"""What the adapter tells of a checkpoint from its configuration, and which it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.errors import ConfigError, UnsupportedError
from pagedkv.plugin.resolved_config import ModelSettings

TinyModel = Callable[[str], Path]


def settings_of(path: Path | str) -> ModelSettings:
    return ModelSettings(str(path), "transformers", "", trust_remote_code=False, allow_pickle=False)


def edit_config(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_facts_of_the_demo_model(demo_model: Path) -> None:
    spec = TransformersModel.describe(settings_of(demo_model))
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.dtype == torch.bfloat16
    assert spec.num_parameters == 134_515_008
    assert len(spec.layers) == 30
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {(9, 3, 64)}
    assert (spec.vocab_size, spec.max_position_tokens, spec.eos_token_ids) == (49152, 8192, (2,))
    assert not spec.has_qk_norm


def test_windows_follow_the_layer_types(tiny_model: TinyModel) -> None:
    gemma = TransformersModel.describe(settings_of(tiny_model("gemma3")))
    assert [layer.sliding_window for layer in gemma.layers] == [6, None, 6]
    mistral = TransformersModel.describe(settings_of(tiny_model("mistral")))
    assert {layer.sliding_window for layer in mistral.layers} == {7}


def test_softcaps_sinks_and_norms_are_told(tiny_model: TinyModel) -> None:
    assert TransformersModel.describe(settings_of(tiny_model("gemma2"))).layers[0].softcap == 2.0
    assert all(layer.has_sinks for layer in TransformersModel.describe(settings_of(tiny_model("gpt_oss"))).layers)
    assert TransformersModel.describe(settings_of(tiny_model("qwen3"))).has_qk_norm
    assert not TransformersModel.describe(settings_of(tiny_model("qwen2"))).has_qk_norm


def test_weights_are_not_needed(tiny_model: TinyModel, tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    assert TransformersModel.describe(settings_of(tmp_path)).num_parameters


def test_the_generation_configs_eos_ids_win(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = edit_config(tiny_model("llama"), tmp_path, eos_token_id=5)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert TransformersModel.describe(settings_of(path)).eos_token_ids == (2, 7)
    (path / "generation_config.json").unlink()
    assert TransformersModel.describe(settings_of(path)).eos_token_ids == (5,)


@pytest.mark.parametrize("path", ["/no/such/directory", "no-such-owner/no-such-model", "./missing"])
def test_a_model_that_is_not_here_is_a_config_error_that_says_what_to_do(path: str) -> None:
    with pytest.raises(ConfigError, match="give the directory"):
        TransformersModel.describe(settings_of(path))


def test_an_empty_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        TransformersModel.describe(settings_of(tmp_path))


def test_an_unknown_model_type_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(UnsupportedError, match="no_such_type"):
        TransformersModel.describe(settings_of(tmp_path))


def test_a_models_own_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    own_code = {"model_type": "homemade", "auto_map": {"AutoConfig": "homemade.HomemadeConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own_code))
    (tmp_path / "homemade.py").write_text("raise RuntimeError('the code ran')")
    with pytest.raises(UnsupportedError, match=r"model\.trust_remote_code"):
        TransformersModel.describe(settings_of(tmp_path))


def test_hybrid_layers_are_refused_by_name(tiny_model: TinyModel) -> None:
    with pytest.raises(UnsupportedError, match="JambaForCausalLM has layers of the types linear_attention"):
        TransformersModel.describe(settings_of(tiny_model("jamba")))


def test_chunked_attention_is_refused_as_its_mask_would_be_lost(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = edit_config(tiny_model("llama"), tmp_path, layer_types=["chunked_attention"] * 3)
    with pytest.raises(UnsupportedError, match="chunked_attention"):
        TransformersModel.describe(settings_of(path))


def test_models_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    transformers.T5Config(d_model=32, num_layers=1, architectures=["T5ForConditionalGeneration"]).save_pretrained(
        tmp_path / "t5"
    )
    transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]).save_pretrained(tmp_path / "llava")
    transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedError, match="T5ForConditionalGeneration is an encoder-decoder"):
        TransformersModel.describe(settings_of(tmp_path / "t5"))
    with pytest.raises(UnsupportedError, match="LlavaForConditionalGeneration takes more than text"):
        TransformersModel.describe(settings_of(tmp_path / "llava"))
    with pytest.raises(UnsupportedError, match="ViTForImageClassification is no causal language model"):
        TransformersModel.describe(settings_of(tmp_path / "vit"))


def test_bidirectional_models_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = edit_config(tiny_model("gemma3"), tmp_path, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedError, match="looks ahead"):
        TransformersModel.describe(settings_of(path))


def test_a_model_is_served_up_to_where_its_rotary_frequencies_vary_with_the_batch(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for rope, positions in [
        ({"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}, 32),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "linear", "factor": 2.0}, 128),
    ]:
        path = edit_config(tiny_model("llama"), tmp_path, rope_parameters={"rope_theta": 10000.0, **rope})
        assert TransformersModel.describe(settings_of(path)).max_position_tokens == positions
