"""`pagedkv plan` on configurations without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.integration.measure.plan import memory_plan as plan_module
from pagedkv.integration.measure.plan.model_facts import read_model
from pagedkv.integration.measure.plan.weights import count_weight_bytes
from pagedkv.plugin.config import load_config
from pagedkv.plugin.memory import DeviceMemory

GIB = 2**30
SMALL = ("--device-memory", "2GiB", "--prompt-tokens", 40, "--output-tokens", 20)


@pytest.fixture
def planned(pagedkv):
    """Runs `pagedkv plan --json` with the flags."""

    def run(*arguments: object) -> dict[str, Any]:
        outcome = pagedkv("plan", *arguments, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return run


def test_the_budget_is_the_share_less_weights_activations_and_graphs(planned, write_config) -> None:
    made = planned(write_config(), *SMALL, "--workspace", "64MiB")
    spent = made["weight_bytes"] + made["activation_bytes"] + made["graph_bytes"]
    left = int(2 * GIB * 0.9) - spent
    assert made["num_blocks"] == min(left // made["kv_bytes_per_block"], 256 * 8)
    assert made["kv_bytes_per_token"] == 2 * 2 * (8 + 8) * 2
    assert "2 GiB × 0.9" in made["formula"]
    assert made["activation_bytes"] > 96 * 2 * 2 * 127  # logits of a chunk, at least
    assert made["graph_bytes"] > 0


def test_workspace_counts_where_the_share_leaves_less_room_for_it(planned, write_config) -> None:
    flags = ("--set", "cache.memory_fraction=1", "--set", "scheduler.max_num_sequences=1000000")
    few, many = (
        planned(write_config(), *SMALL, *flags, "--workspace", size, "--set", "graphs.batch_sizes=1")["kv_bytes"]
        for size in ("256MiB", "0")
    )
    assert many - few == pytest.approx(256 * 2**20, abs=2048)


def test_requests_at_once_follow_lengths_blocks_and_kv_dtype(planned, write_config) -> None:
    made = planned(write_config(), *SMALL, "--set", "cache.num_blocks=100")
    assert made["paged"] == {
        "num_tokens": 1600,
        "mean_requests": 28,  # 3 blocks at 9 of 20 steps, 4 at 11
        "worst_requests": 25,
        "longest_requests": 12,
    }
    assert made["contiguous"]["longest_requests"] == 1600 // 128
    assert {change["num_blocks"] for change in made["kv_dtypes"]} == {100}
    by_memory = planned(write_config(), *SMALL, "--set", "cache.memory=1MiB")
    blocks = {change["kv_dtype"]: change["num_blocks"] for change in by_memory["kv_dtypes"]}
    assert blocks["bf16"] == 2**20 // made["kv_bytes_per_block"]
    assert blocks["bf16"] < blocks["int8"] < blocks["int8_static"]


def test_shards_hold_their_part_and_devices_are_counted(planned, write_config) -> None:
    flags = (*SMALL, "--set", "cache.memory=1MiB", "--set", "model.decoder=off", "--concurrency", 1000)
    one, two = (planned(write_config(), *flags, "--num-devices", n) for n in (1, 2))
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 2
    assert one["weight_bytes"] / 2 < two["weight_bytes"] < one["weight_bytes"]
    assert [option["num_shards"] for option in one["device_options"]] == [1, 2, 4]
    best = one["device_options"][0]
    assert best["num_devices"] * best["requests_per_replica"] >= 1000
    assert best["num_replicas"] == -(-1000 // best["requests_per_replica"])


def test_heads_that_do_not_divide_are_refused(pagedkv, write_config) -> None:
    outcome = pagedkv("plan", write_config(), *SMALL, "--num-devices", 3)
    assert (outcome.code, "can't be split over 3 shards" in outcome.err) == (2, True)


def test_weights_of_known_models_are_counted_to_the_parameter(known, write_config) -> None:
    for name, num_parameters in (("llama-3-8b", 8_030_261_248), ("llama-2-13b", 13_015_864_320)):
        facts = read_model(load_config(overrides={"model.path": str(write_config(**known[name]))}))
        assert facts.spec.num_parameters == num_parameters
        rotary_bytes = 2 * 64 * 4
        assert count_weight_bytes(facts, torch.bfloat16, 1) == 2 * num_parameters + rotary_bytes
        assert not facts.refusal


def test_a_file_of_any_name_is_a_config(planned, write_config) -> None:
    file = write_config() / "config.json"
    renamed = file.with_name("tiny.json")
    of_file = planned(file, *SMALL)
    file.rename(renamed)
    assert planned(renamed, *SMALL) == of_file


@pytest.mark.parametrize(
    ("values", "reason", "bytes_per_token"),
    [
        (
            {
                "model_type": "gemma3",
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 32,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "intermediate_size": 48,
                    "vocab_size": 96,
                    "max_position_embeddings": 128,
                },
                "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            },
            "takes more than text",
            3 * 2 * 32 * 2,
        ),
        ({"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}, "drops the keyword", 2 * 2 * 16 * 2),
    ],
)
def test_a_model_that_is_refused_says_why_and_still_has_its_bytes(
    planned, write_config, values, reason, bytes_per_token
) -> None:
    made = planned(write_config(**values), *SMALL, "--dtype", "bfloat16")
    assert reason in made["refusal"]
    assert any("can't serve" in note for note in made["notes"])
    assert made["kv_bytes_per_token"] == bytes_per_token
    assert made["num_blocks"] > 0


def test_latent_attention_is_planned_as_it_is_kept(planned, write_config) -> None:
    latent = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }
    made = planned(write_config(**latent), *SMALL)
    assert not made["refusal"]
    (kind,) = made["layer_kinds"]
    assert kind["bytes_per_token"] == made["kv_bytes_per_token"] == 2 * 4 * (16 + 8) * 2
    assert kind["latent_bytes_per_token"] == 2 * (16 + 8) * 2
    assert not any("estimate" in note for note in made["notes"])


def test_the_machine_s_own_memory_is_that_of_its_container(planned, write_config, monkeypatch) -> None:
    container = DeviceMemory(total_bytes=3 * GIB, free_bytes=2 * 10**6, is_host=True)
    monkeypatch.setattr(plan_module, "find_memory", lambda device, given: container)
    made = planned(
        write_config(), *SMALL[2:], "--set", "model.device=cpu", "--dtype", "bfloat16", "--set", "cache.block_size=8"
    )
    free = container.free_bytes - made["weight_bytes"]
    assert made["num_blocks"] == min(int(free * 0.5 * 0.9) // made["kv_bytes_per_block"], 256 * 16)
    assert made["activation_bytes"] == 0


def test_tables_show_the_formula_and_a_plot_is_drawn(pagedkv, write_config, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "220")
    outcome = pagedkv("plan", write_config(), *SMALL, "--concurrency", 9, "--plot", tmp_path / "plot.svg")
    assert outcome.code == 0, outcome.err
    assert "2 layers × 2 KV heads × (8 + 8) × 2 B = 128 B" in outcome.out
    assert "min(2 GiB × 0.9 −" in outcome.out
    assert "contiguous" in outcome.out
    assert (tmp_path / "plot.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL"),
        (["MODEL", "--device-memory", "80 cows"], "--device-memory is a size"),
        (["MODEL", "--device-memory", "1GiB", "--prompt-tokens", 500], "limit of 128 tokens"),
        (["MODEL", "--check", "--num-devices", 2], "leave out devices"),
    ],
)
def test_what_can_not_be_planned_is_explained(pagedkv, write_config, arguments, message) -> None:
    directory = write_config()
    outcome = pagedkv("plan", *(directory if one == "MODEL" else one for one in arguments))
    assert outcome.code == 2
    assert message in outcome.err
