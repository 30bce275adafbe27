"""Bytes of a token beside the figures that are published for known models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from pagedkv.adapters.transformers.description import describe_layers
from pagedkv.integration.measure.plan.layer_kinds import LayerKind, find_layer_kinds
from pagedkv.integration.measure.plan.model_facts import LatentKV
from pagedkv.plugin.kv_dtypes import find_kv_dtype, known_kv_dtypes
from pagedkv.plugin.model_spec import ModelSpec


def kinds_of(values: dict, kv_dtype: str = "bf16", block_size: int = 16) -> list[LayerKind]:
    config = AutoConfig.for_model(**values)
    spec = ModelSpec("", torch.bfloat16, describe_layers(config), 1, 1, 1, (), None, None)
    rank = getattr(config, "kv_lora_rank", None)
    latent = LatentKV(rank, config.qk_rope_head_dim) if rank else None
    return find_layer_kinds(spec, block_size, find_kv_dtype(kv_dtype), latent)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-2-13b", 819_200),  # 0.78 MiB in fp16, the figure of many guides
        ("llama-3-8b", 128 * 1024),
        ("mistral-7b-v0.1", 128 * 1024),
        # Zhao et al., "Insights into DeepSeek-V3" (ISCA 2025), table 1: 516.096 KB and 327.680 KB a token in BF16
        ("llama-3.1-405b", 516_096),
        ("qwen2.5-72b", 327_680),
        ("qwen3-0.6b", 114_688),
        ("gemma-3-1b", 26_624),
    ],
)
def test_bytes_of_a_token_are_the_published_ones(known, name: str, num_bytes: int) -> None:
    assert sum(kind.bytes_per_token for kind in kinds_of(known[name])) == num_bytes


@pytest.mark.parametrize(("name", "wrong", "right"), [("qwen3-0.6b", 57_344, 114_688), ("gemma-3-1b", 29_952, 26_624)])
def test_the_rule_that_takes_hidden_size_over_heads_for_head_dim_is_wrong(known, name, wrong, right) -> None:
    values = known[name]
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    rule = 2 * 2 * values["num_hidden_layers"] * values["num_key_value_heads"] * head_dim
    assert (rule, sum(kind.bytes_per_token for kind in kinds_of(values))) == (wrong, right)


def test_the_rule_that_forgets_grouped_queries_is_four_times_too_much(known) -> None:
    values = known["llama-3-8b"]
    rule = 2 * 2 * values["num_hidden_layers"] * values["hidden_size"]
    assert rule == 4 * kinds_of(values)[0].bytes_per_token


def test_the_rule_that_halves_for_eight_bits_forgets_the_scales(known) -> None:
    (bf16,), (int8,) = (kinds_of(known["llama-3-8b"], name) for name in ("bf16", "int8"))
    # a float32 scale for keys and one for values, of each head, token and layer
    assert int8.bytes_per_token == bf16.bytes_per_token / 2 + 32 * 8 * 2 * 4
    assert "+ 8 B of scales" in int8.formula


@pytest.mark.parametrize(("name", "num_latent_bytes"), [("deepseek-v2", 69_120), ("deepseek-v3", 70_272)])
def test_latent_attention_shows_what_is_kept_and_what_the_latent_would_take(known, name, num_latent_bytes) -> None:
    (kind,) = kinds_of(known[name])
    num_layers = known[name]["num_hidden_layers"]
    assert kind.name.startswith("MLA")
    assert kind.bytes_per_token == num_layers * 128 * (128 + 64 + 128) * 2
    # 70.272 KB: Zhao et al. (2025), table 1
    assert kind.latent_bytes_per_token == num_latent_bytes


def test_layers_with_a_window_are_a_kind_of_their_own(known) -> None:
    kinds = kinds_of(known["gemma-3-1b"])
    assert [(kind.num_layers, kind.sliding_window) for kind in kinds] == [(22, 512), (4, None)]
    assert kinds[0].bytes_per_token == 22 * 1024
    (mistral,) = kinds_of(known["mistral-7b-v0.1"])
    assert mistral.name == "GQA 32/8, sliding window 4096"


@pytest.mark.parametrize("kv_dtype", known_kv_dtypes())
@pytest.mark.parametrize("block_size", [8, 64])
def test_kinds_add_up_to_the_engine_s_bytes_a_block(known, kv_dtype: str, block_size: int) -> None:
    values = known["gemma-3-1b"]
    spec = ModelSpec("", torch.bfloat16, describe_layers(AutoConfig.for_model(**values)), 1, 1, 1, (), None, None)
    num_bytes = sum(kind.bytes_per_token for kind in kinds_of(values, kv_dtype, block_size)) * block_size
    assert num_bytes == spec.bytes_per_block(block_size, find_kv_dtype(kv_dtype))
