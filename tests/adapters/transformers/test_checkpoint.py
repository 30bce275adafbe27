"""What loading a checkpoint needs beside transformers."""

from __future__ import annotations

import pytest
import torch

from pagedkv.adapters.transformers import checkpoint
from pagedkv.plugin.errors import ConfigError


@pytest.mark.parametrize(("device", "split", "extra"), [("cuda", None, "gpu"), ("cpu", {"tp_plan": "auto"}, "shards")])
def test_without_accelerate_a_gpu_and_shards_say_what_to_install(
    tiny_model, resolved, device: str, split: dict[str, str] | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolved(tiny_model("llama"))
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pagedkv\[{extra}\]"):
        checkpoint.load_causal_model(
            config.model,
            checkpoint.load_model_config(config.model),
            dtype=torch.float32,
            device=torch.device(device),
            attn_implementation=None,
            split=split,
        )


def test_a_cpu_needs_no_accelerate(tiny_model, resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(tiny_model("llama"))
    monkeypatch.setattr(checkpoint, "_require_accelerate", lambda device: pytest.fail("accelerate is asked for"))
    model = checkpoint.load_causal_model(
        config.model,
        checkpoint.load_model_config(config.model),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attn_implementation=None,
    )
    assert next(model.parameters()).device.type == "cpu"
