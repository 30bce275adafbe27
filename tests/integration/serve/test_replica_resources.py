"""A machine divided between replicas: threads, memory, GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.integration.serve.replica_resources import choose_gpu, share_memory, share_threads
from pagedkv.plugin.config import Config, load_config
from pagedkv.plugin.threads import choose_threads


def config(**overrides: object) -> Config:
    return load_config(None, {name.replace("__", "."): value for name, value in overrides.items()}, {})


def test_replicas_on_one_device_share_the_memory_that_one_would_take() -> None:
    def shares(num_replicas: int, **overrides: object) -> dict[str, Any]:
        return share_memory(config(**{"model__device": "cpu", **overrides}), num_replicas)

    assert shares(1) == {}
    assert shares(3, cache__memory_fraction=0.6) == {"cache.memory_fraction": pytest.approx(0.2)}
    assert shares(3, cache__memory="1GiB") == shares(3, cache__num_blocks=100) == {}


def test_replicas_take_gpus_in_turn_unless_the_config_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def visible(index: int, device: str, **environ: str) -> str | None:
        return choose_gpu(config(model__device=device), index, environ).get("CUDA_VISIBLE_DEVICES")

    assert [visible(index, "auto") for index in range(3)] == ["0", "1", "0"]
    assert visible(1, "cuda", CUDA_VISIBLE_DEVICES="4,GPU-7") == "GPU-7"
    assert visible(1, "cuda:1") is None
    assert visible(1, "cpu") is None
    assert share_memory(config(model__device="auto"), 2) == {}
    fraction = config().cache.memory_fraction
    assert share_memory(config(model__device="auto"), 3) == {"cache.memory_fraction": fraction / 2}
    assert share_memory(config(model__device="cuda:1"), 2) == {"cache.memory_fraction": fraction / 2}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible(1, "auto") is None
    assert share_memory(config(model__device="auto"), 2) == {"cache.memory_fraction": fraction / 2}


def test_replicas_share_the_threads_that_one_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_threads = choose_threads("auto").num_threads
    assert share_threads(config(), 1) == {}
    assert share_threads(config(), num_threads + 1) == {"model.threads": 1}
    assert share_threads(config(model__threads=3), 2) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_threads(config(), 2) == {}
