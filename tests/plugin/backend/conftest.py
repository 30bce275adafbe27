"""A paged backend over the token model: real cache, scheduler, kernels and sampler; no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

MakeBackend = Callable[..., PagedBackend]


@pytest.fixture(scope="session")
def token_model() -> TokenModel:
    return TokenModel()


@pytest.fixture
def make_backend(token_model: TokenModel) -> Iterator[MakeBackend]:
    """Makes warmed-up backends; at the end each must be empty and whole."""
    made: list[PagedBackend] = []

    def make(num_blocks: int = 512, limits: WarmupLimits | None = None, **settings: Any) -> PagedBackend:
        overrides = {"model.path": "none", "cache.num_blocks": num_blocks} | {
            name.replace("__", "."): value for name, value in settings.items()
        }
        config = resolve_config(load_config(None, overrides, {}), token_model.spec)
        kernels = load_plugin(KERNELS, "reference").create(torch.device("cpu"))
        backend = PagedBackend(config, token_model, kernels)
        backend.warmup(limits or WarmupLimits())
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.check_integrity()
        stats = backend.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        backend.close()
