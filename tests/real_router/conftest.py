"""Deployments of the real launcher and router that tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from .deployment import LAUNCHER, PROGRAMS_VARIABLE, ROUTER, Deployment, Launch
from .reference import Reference
from .request_kinds import MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS

NUM_BLOCKS = 1024
LIMIT_FLAGS = ("--max-input-tokens", str(MAX_INPUT_TOKENS), "--max-total-tokens", str(MAX_TOTAL_TOKENS))
SETTINGS = {"PAGEDKV_CACHE_NUM_BLOCKS": str(NUM_BLOCKS)}


TIMEOUT_S = 1800
"""Of a test: a start takes minutes where other work has the cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"{PROGRAMS_VARIABLE} names no folder with {LAUNCHER} and {ROUTER}")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not os.environ.get(PROGRAMS_VARIABLE):
            item.add_marker(skip)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    programs = Path(os.environ[PROGRAMS_VARIABLE]).absolute()
    for name in (LAUNCHER, ROUTER):
        assert (programs / name).is_file(), f"{PROGRAMS_VARIABLE} is {programs}, and there is no {name}"
    folder = Path(tempfile.mkdtemp(prefix="pagedkv-"))
    try:
        yield Launch(programs, folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny_model(save_tiny_llama: Callable[..., Path]) -> Path:
    """Random, float32, 4 query and 2 KV heads, 16384 positions, with the demo model's tokenizer and chat template. The
    heads have a size for which the launcher leaves prefix caching on."""
    return save_tiny_llama(max_position_embeddings=16384, head_dim=64)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The references and the servers share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session", params=[1, 2], ids=["one shard", "two shards"])
def deployment(request: pytest.FixtureRequest, launch: Launch, tiny_model: Path) -> Iterator[Deployment]:
    """The tiny model behind launcher and router, with one shard and with two. Tests share it and stop nothing."""
    with launch.launcher(tiny_model, *LIMIT_FLAGS, num_shards=request.param, settings=SETTINGS) as started:
        yield started
