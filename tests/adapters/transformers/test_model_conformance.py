"""The transformers adapter, and the token model of the tests, do what every model adapter must."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.model_adapter import ModelAdapterConformance
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import ModelAdapter
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings


class TestTokenModel(ModelAdapterConformance):
    def make_adapter(self) -> ModelAdapter:
        return TokenModel(num_layers=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=128, n_embd=32, n_layer=3, n_head=4, eos_token_id=2)
    directory = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


class TestTransformersModel(ModelAdapterConformance):
    directory: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def _use(self, checkpoint: Path) -> None:
        type(self).directory = checkpoint

    def make_adapter(self) -> ModelAdapter:
        written = load_config(None, {"model.path": str(self.directory), "model.dtype": "float32"}, {})
        config = resolve_config(written, TransformersModel.describe(resolve_model_settings(written)))
        return TransformersModel.load(config, torch.device("cpu"))
