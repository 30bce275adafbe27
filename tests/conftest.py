"""What every test may use: the demo model, and settings that make runs repeatable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.integration.demo_model import ensure_demo_model

pytest_plugins = ["longest_first"]

settings.register_profile("fast", derandomize=True, deadline=None, max_examples=25, database=None)
settings.register_profile(
    "thorough",
    derandomize=False,
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores: one thread each, so that they don't fight for them. Nor do the processes
    # that they start: threads of OpenMP that wait for one another spin, and a server's start would take twice as long.
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of SmolLM2-135M-Instruct in bfloat16, made on first use and cached between runs."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def save_tiny_llama(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`save_tiny_llama(num_hidden_layers=1)`: a Llama's checkpoint; two layers of 4 query and 2 KV heads, which
    two shards can divide; float32, random weights, the demo model's tokenizer."""

    def save(**config: Any) -> Path:
        shape = {
            "vocab_size": 49152,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "initializer_range": 0.5,
        }
        torch.manual_seed(0)
        directory = tmp_path_factory.mktemp("models") / "tiny-llama"
        LlamaForCausalLM(LlamaConfig(**{**shape, **config})).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"):
            shutil.copy(demo_model / name, directory / name)
        return directory

    return save
