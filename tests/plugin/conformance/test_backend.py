"""The paged backend does what every backend must."""

from __future__ import annotations

from typing import ClassVar

import torch

from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.backend import BackendConformance
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config


class TestPagedBackend(BackendConformance):
    settings: ClassVar[dict[str, object]] = {}

    def make_backend(self) -> Backend:
        model = TokenModel()
        config = load_config(None, {"model.path": "none", "cache.num_blocks": 600} | self.settings, {})
        kernels = load_plugin(KERNELS, "reference").create(torch.device("cpu"))
        return PagedBackend(resolve_config(config, model.spec), model, kernels)


class TestPagedBackendInSmallChunks(TestPagedBackend):
    settings: ClassVar[dict[str, object]] = {"scheduler.max_step_tokens": 5}
