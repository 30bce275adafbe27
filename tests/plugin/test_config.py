"""The configuration: where values come from, what is refused and how, and how "auto" is answered."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from pagedkv.plugin.config import Config, list_config_keys, load_config, parse_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBytes, MemoryFraction, resolve_config

MODEL = ModelSpec(
    architecture="Toy",
    dtype=torch.bfloat16,
    layers=(AttentionSpec(4, 2, 8, 8),),
    vocab_size=100,
    hidden_size=32,
    max_position_tokens=512,
    eos_token_ids=(1,),
    bos_token_id=None,
    pad_token_id=None,
)


def write_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pagedkv.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_go_over_environment_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = write_config(tmp_path, '[cache]\nblock_size = 32\nkv_dtype = "fp16"\n[scheduler]\nmax_num_sequences = 3\n')
    environ = {"PAGEDKV_CACHE_BLOCK_SIZE": "64", "PAGEDKV_SCHEDULER_MAX_NUM_SEQUENCES": "4", "HOME": "/"}
    config = load_config(path, {"scheduler.max_num_sequences": 5}, environ)
    assert (config.cache.kv_dtype, config.cache.block_size, config.scheduler.max_num_sequences) == ("fp16", 64, 5)
    assert config.scheduler.max_step_tokens == Config().scheduler.max_step_tokens


def test_a_variable_names_the_file_and_an_argument_goes_over_it(tmp_path: Path) -> None:
    named = write_config(tmp_path, 'backend = "contiguous"')
    environ = {"PAGEDKV_CONFIG": str(named)}
    assert load_config(environ=environ).backend == "contiguous"
    other = tmp_path / "other.toml"
    other.write_text('backend = "paged"')
    assert load_config(other, environ=environ).backend == "paged"
    assert load_config(environ={}) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\nblok_size = 16", r"unknown key cache\.blok_size; did you mean cache\.block_size\?"),
        ("[cahce]\nblock_size = 16", r"unknown key cahce; did you mean cache\?"),
        ("qqqq = 1", r"unknown key qqqq$"),
        ("[cache]\nblock_size = 24", r"cache\.block_size: must be a power of two from 8 to 256 \(found 24\)"),
        ("[cache]\nblock_size = 4", r"power of two from 8 to 256"),
        ("[cache]\nblock_size = 512", r"power of two from 8 to 256"),
        ('[cache]\nkv_dtype = "fp7"', r"cache\.kv_dtype: unknown KV dtype; known: auto, .*bf16"),
        ('[cache]\nmemory = "many"', r"cache\.memory: .*\(found 'many'\)"),
        ("[cache]\nmemory_fraction = 1.5", r"cache\.memory_fraction: .*\(found 1\.5\)"),
        ("[cache]\novercommit = 0.5", r"cache\.overcommit"),
        ("[scheduler]\nmax_step_tokens = 0", r"scheduler\.max_step_tokens: .*greater than 0"),
        ("[limits]\nmax_input_tokens = -1", r"limits\.max_input_tokens"),
        ('[model]\ndtype = "float64"', r"model\.dtype"),
        ('log_level = "LOUD"', r"log_level"),
        ("cache = 3", r"cache: .*\(found 3\)"),
    ],
)
def test_a_wrong_value_or_unknown_key_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path, text), environ={})


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    path = write_config(tmp_path, "[cache]\nblock_size = 24\novercommit = 0\n[scheduler]\nfoo = 1")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} is not valid:"
    assert len(lines) == 4


def test_an_unknown_environment_variable_is_refused_and_foreign_ones_are_not() -> None:
    with pytest.raises(ConfigError, match=r"PAGEDKV_CACHE_BLOCKSIZE; did you mean PAGEDKV_CACHE_BLOCK_SIZE\?"):
        load_config(environ={"PAGEDKV_CACHE_BLOCKSIZE": "16"})
    assert load_config(environ={"PAGED_ATTENTION": "1"}) == Config()


def test_an_unreadable_or_malformed_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the config file .*missing\.toml"):
        load_config(tmp_path / "missing.toml", environ={})
    with pytest.raises(ConfigError, match="not a valid TOML file"):
        load_config(write_config(tmp_path, "[cache"), environ={})


def test_a_key_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache must be a table"):
        load_config(None, {"cache": 3, "cache.block_size": 16}, {})


def test_every_key_can_be_set_by_its_environment_variable() -> None:
    keys = list_config_keys()
    assert len({key.environment_variable for key in keys}) == len(keys)
    assert all(key.description for key in keys), "each key says what it is for"
    environ = {
        key.environment_variable: ",".join(key.default) if isinstance(key.default, tuple) else str(key.default)
        for key in keys
    }
    assert load_config(environ=environ) == Config()


def test_sizes_are_written_with_units() -> None:
    assert parse_config({"cache": {"memory": "1.5GiB"}}).cache.memory == 3 * 2**29


@pytest.mark.parametrize(
    ("cache", "budget"),
    [
        ({}, MemoryFraction(0.9)),
        ({"memory_fraction": 0.25}, MemoryFraction(0.25)),
        ({"memory": "2KiB"}, MemoryBytes(2048)),
        ({"memory": "2KiB", "num_blocks": 7}, MemoryBlocks(7)),
    ],
)
def test_the_pool_has_one_budget(cache: dict[str, object], budget: object) -> None:
    assert resolve_config(parse_config({"cache": cache, "model": {"path": "m"}}), MODEL).cache.budget == budget


@pytest.mark.parametrize(
    ("has_bf16", "dtype", "kv_dtype"), [(True, torch.bfloat16, "bf16"), (False, torch.float32, "fp32")]
)
def test_auto_is_answered_by_model_and_machine_and_nothing_is_left_open(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: torch.dtype, kv_dtype: str
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    resolved = resolve_config(parse_config({"model": {"path": "m", "device": "cpu"}}), MODEL)
    assert (resolved.dtype, resolved.cache.kv_dtype.name) == (dtype, kv_dtype)
    assert (resolved.max_total_tokens, resolved.max_input_tokens) == (512, 511)
    assert resolved.scheduler.block_size == resolved.cache.block_size == 16
    # Of these two, "auto" is the name of a plugin.
    values = asdict(replace(resolved, kernels="named", model=replace(resolved.model, decoder="named")))
    assert "auto" not in str(values)
    assert None not in values.values()


def test_what_is_written_goes_over_the_model() -> None:
    config = parse_config(
        {
            "model": {"path": "m", "dtype": "float32", "device": "cpu"},
            "cache": {"kv_dtype": "fp16"},
            "limits": {"max_total_tokens": 100, "max_input_tokens": 40},
        }
    )
    resolved = resolve_config(config, MODEL)
    assert (resolved.dtype, resolved.cache.kv_dtype.name) == (torch.float32, "fp16")
    assert (resolved.max_total_tokens, resolved.max_input_tokens) == (100, 40)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limits": {"max_total_tokens": 513}}, "the model was made for 512 tokens"),
        ({"limits": {"max_total_tokens": 64, "max_input_tokens": 64}}, "must be below limits.max_total_tokens"),
        ({"model": {"device": "toaster"}}, "model.device"),
        ({"model": {"device": "cuda:99"}}, "torch sees .* GPUs here"),
        ({"model": {"path": ""}}, "no model is named"),
    ],
)
def test_contradictions_with_the_model_or_the_machine_are_refused(values: dict[str, object], message: str) -> None:
    model = {"path": "m", **values.pop("model", {})}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=message):
        resolve_config(parse_config({"model": model, **values}), MODEL)
