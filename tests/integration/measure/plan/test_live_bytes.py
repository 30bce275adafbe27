"""The meter of live tensors: what it counts, and that shapes alone give what real memory gives."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from pagedkv.adapters.transformers.attention import ATTENTION_NAME
from pagedkv.adapters.transformers.checkpoint import build_meta_model
from pagedkv.adapters.transformers.description import describe_layers
from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.integration.measure.plan.live_bytes import LiveBytes
from pagedkv.integration.measure.plan.shapes import ShapeKernels
from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.kv_dtypes import BF16
from pagedkv.plugin.model_spec import ModelSpec
from pagedkv.plugin.resolved_config import resolve_model_settings


def test_peak_counts_what_lives_at_once_and_no_view_twice() -> None:
    before = torch.empty(1000)
    with LiveBytes("cpu") as live:
        a = torch.empty(100, dtype=torch.float32)
        b = a.view(10, 10).t()
        c = before[:10]
        assert live.num_bytes == 400
        del a
        assert live.num_bytes == 400
        del b
        assert live.num_bytes == 0
        d = torch.empty(25)
    assert (live.num_bytes, live.peak_bytes, len(c), len(d)) == (100, 400, 10, 25)


def test_what_asks_for_content_gets_all_there_could_be() -> None:
    with LiveBytes("meta"), torch.inference_mode():
        x = torch.empty(5, 3, device="meta")
        assert x[x > 0].shape == (15,)
        assert (x > 0).nonzero().shape == (15, 2)
        assert x.sum().item() == 0.0
        assert x.tolist() == [[0.0] * 3] * 5


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma3_text"])
def test_a_forward_on_the_meta_device_lives_in_as_many_bytes_as_a_real_one(model_type: str) -> None:
    def measure(device: str) -> int:
        config = AutoConfig.for_model(
            model_type,
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            num_local_experts=2,
            num_experts_per_tok=2,  # all experts of each token: with shapes alone, those are assumed
            dtype="bfloat16",
        )
        settings = resolve_model_settings(parse_config({"model": {"path": "none"}}))
        modules = build_meta_model(config, settings, ATTENTION_NAME).to(torch.bfloat16).eval()
        if device == "cpu":
            modules = modules.to_empty(device="cpu")
            for tensor in (*modules.parameters(), *modules.buffers()):
                tensor.data.zero_()
        spec = ModelSpec("", torch.bfloat16, describe_layers(config), 512, 64, 128, (), None, None)
        kernels = ShapeKernels()
        storage = [kernels.allocate(layer.cache_spec(16, BF16), 4) for layer in spec.layers]
        ids = torch.zeros(40, dtype=torch.int64, device=device)
        starts = torch.zeros(2, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(starts, starts, starts[None], ids, 40, 40, 0)
        with torch.inference_mode(), LiveBytes(device) as live:
            logits = TransformersModel(modules, spec).forward(
                ModelInput(ids, ids, ids), AttentionContext(kernels, storage, metadata)
            )
        assert logits.shape == (40, 512)
        return live.peak_bytes

    assert measure("meta") == pytest.approx(measure("cpu"), rel=0.03)
