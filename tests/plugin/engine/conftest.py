"""Tiny random models with the demo model's tokenizer: real text, real transformers, milliseconds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedkv.plugin import Engine


@pytest.fixture(scope="session")
def tiny_model(save_tiny_llama: Callable[..., Path]) -> Path:
    return save_tiny_llama(max_position_embeddings=2048, tie_word_embeddings=True)


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
        stats = engine.stats()
        engine.loop.run_on_thread(engine.backend.check_integrity).result()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        engine.close()
