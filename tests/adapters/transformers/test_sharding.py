"""What a split is told to transformers, and which models are refused; shards themselves run in tests/integration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from pagedkv.adapters.transformers.checkpoint import build_meta_model, load_model_config
from pagedkv.adapters.transformers.description import describe_checkpoint
from pagedkv.adapters.transformers.sharding import (
    check_split,
    count_shard_parameters,
    describe_shard,
    keep_shared_head,
    plan_split,
)
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.resolved_config import resolve_model_settings


@pytest.fixture
def whole(tiny_model):
    """`whole("llama")`: the spec and the modules of a tiny model."""

    def describe(name: str):
        settings = resolve_model_settings(parse_config({"model": {"path": str(tiny_model(name))}}))
        return describe_checkpoint(settings), build_meta_model(load_model_config(settings), settings)

    return describe


def test_plan_is_transformers_own_where_kv_heads_divide(whole) -> None:
    config = plan_split(*whole("llama"), num_shards=2)["distributed_config"]
    assert (config.tp_size, config.tp_plan) == (2, "auto")


def test_key_and_value_projections_stay_whole_where_shards_share_a_head(whole) -> None:
    config = plan_split(*whole("llama"), num_shards=4)["distributed_config"]
    assert config.tp_plan == {
        "model.layers.*.self_attn.k_proj": "replicate",
        "model.layers.*.self_attn.v_proj": "replicate",
    }


def test_shared_head_is_the_one_that_the_shard_s_query_heads_read(whole, dense_model) -> None:
    spec, _ = whole("llama")
    full = dense_model("llama").model.layers[0].self_attn.k_proj.weight
    part = transformers.AutoModelForCausalLM.from_config(dense_model("llama").config)
    part.load_state_dict(dense_model("llama").state_dict())
    keep_shared_head(part, spec, ShardInfo(rank=2, num_shards=4))
    assert part.model.layers[0].self_attn.k_proj.weight.equal(full[8:16])


@pytest.mark.parametrize("num_shards", [3, 8])
def test_heads_that_do_not_divide_are_refused(whole, num_shards: int) -> None:
    with pytest.raises(UnsupportedError, match=f"over {num_shards} shards; the numbers .* are 1, 2, 4$"):
        plan_split(*whole("llama"), num_shards=num_shards)


def test_architecture_without_a_plan_is_refused(whole) -> None:
    with pytest.raises(UnsupportedError, match="has no tensor-parallel plan in transformers"):
        plan_split(*whole("opt"), num_shards=2)


def test_layers_that_hold_neither_their_part_nor_the_whole_are_refused(whole) -> None:
    spec, _ = whole("llama")
    odd = replace(spec, layers=tuple(replace(layer, num_kv_heads=1, num_heads=4) for layer in spec.layers))
    with pytest.raises(UnsupportedError, match="layer 0 has \\(4, 1\\) query and KV heads on a shard, not \\(2, 1\\)"):
        check_split(spec, odd, 2)


def test_attention_that_the_plan_leaves_whole_is_served_with_a_warning(whole, caplog) -> None:
    spec, _ = whole("llama")
    check_split(spec, spec, 2)
    assert "every shard keeps all KV heads" in caplog.text


@pytest.mark.parametrize(
    ("num_shards", "projections"), [(1, (1024, 512)), (2, (512, 256)), (4, (256, 256))], ids=["whole", "2", "4"]
)
def test_parameters_of_a_shard_are_counted_without_loading(whole, num_shards: int, projections) -> None:
    spec, modules = whole("llama")
    counts = count_shard_parameters(modules, num_shards, spec.layers[0].num_kv_heads)
    attention = "model.layers.1.self_attn"
    assert (counts[f"{attention}.q_proj.weight"], counts[f"{attention}.k_proj.weight"]) == projections
    assert counts[f"{attention}.o_proj.weight"] == 1024 // num_shards
    assert counts["model.layers.1.mlp.down_proj.weight"] == 32 * 48 // num_shards
    assert counts["model.norm.weight"] == 32
    assert describe_shard(spec, modules, num_shards).layers[0].num_kv_heads == max(1, 2 // num_shards)


def test_a_shard_of_a_model_whose_attention_is_not_split_keeps_all_heads(whole) -> None:
    spec, modules = whole("phi3")
    assert describe_shard(spec, modules, 2) == spec
