"""The contiguous backend does what every backend must."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.transformers.contiguous_backend import ContiguousBackend
from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.backend import BackendConformance
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class TestContiguousBackend(BackendConformance):
    directory: ClassVar[Path]
    prompts: ClassVar[Sequence[Sequence[int]]] = BackendConformance.prompts

    @pytest.fixture(autouse=True)
    def _use(self, checkpoint: Path) -> None:
        type(self).directory = checkpoint

    def make_backend(self) -> Backend:
        written = load_config(
            None, {"model.path": str(self.directory), "model.dtype": "float32", "cache.memory": "8MiB"}, {}
        )
        model = TransformersModel.describe(resolve_model_settings(written))
        return ContiguousBackend.create(resolve_config(written, model))
