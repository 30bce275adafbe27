"""Tiny random models with the demo model's tokenizer: real text, real transformers, milliseconds a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.plugin import Engine


@pytest.fixture(scope="session")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with 4 query and 2 KV heads, float32, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, directory / name)
    return directory


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines; at the end nothing may run in them and their books must balance."""
    made: list[Engine] = []

    def make(backend: str | None = None, model: Path = tiny_model, **settings: Any) -> Engine:
        config = {"cache.num_blocks": 2048, "model.dtype": "float32"}
        engine = Engine(model, backend, config | {name.replace("__", "."): value for name, value in settings.items()})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.backend.check_integrity()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        engine.close()
