"""`pagedkv plan --check` on a tiny random model, with both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from pagedkv.integration.measure.plan import memory_plan as plan_module
from pagedkv.integration.measure.plan.weights import count_weight_bytes

SETTINGS = ("model.device=cpu", "cache.memory=32MiB", "scheduler.max_step_tokens=64")
FLAGS = ["--check", "--dtype", "bfloat16", *(part for setting in SETTINGS for part in ("--set", setting))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=32768,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    path = tmp_path_factory.mktemp("tiny")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-dtype", "bf16"),
        ("--kv-dtype", "int8", "--set", "cache.num_blocks=5000"),
        ("--backend", "contiguous", "--set", "cache.overcommit=2"),
    ],
)
def test_the_plan_is_true_within_three_percent(pagedkv, checkpoint: Path, arguments) -> None:
    outcome = pagedkv("plan", checkpoint, *FLAGS, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    compared = {one["what"]: one for one in json.loads(outcome.out)["comparisons"]}
    assert {"weights, bytes", "KV, bytes", "tokens", "KV of a request, bytes"} < set(compared)
    assert all(one["found"] > 0 for one in compared.values())
    assert all(abs(one["difference"]) <= 0.03 for one in compared.values())


def test_a_plan_that_is_not_true_fails_and_says_where(pagedkv, checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan_module, "count_weight_bytes", lambda *args: int(1.05 * count_weight_bytes(*args)))
    monkeypatch.setenv("COLUMNS", "150")
    outcome = pagedkv("plan", checkpoint, *FLAGS, "--backend", "contiguous")
    assert outcome.code == 1
    assert "the plan is not true: weights, bytes" in outcome.err
    assert "tokens" not in outcome.err
    assert "Activations, graphs and workspace are not compared" in outcome.out


def test_what_the_engine_refuses_is_refused(pagedkv, checkpoint: Path) -> None:
    outcome = pagedkv("plan", checkpoint, *FLAGS, "--backend", "contiguous", "--kv-dtype", "int8")
    assert (outcome.code, "cache.kv_dtype" in outcome.err) == (2, True)
