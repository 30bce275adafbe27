"""The arithmetic of a contiguous cache's capacity, without a model."""

from __future__ import annotations

import pytest

from pagedkv.adapters.transformers import contiguous_sizing
from pagedkv.adapters.transformers.contiguous_sizing import Lengths, compute_limits
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.memory import DeviceMemory

LENGTHS = Lengths(max_input_tokens=127, max_total_tokens=128, is_total_demanded=False)


def capacity(config, **arguments) -> int:
    limits = compute_limits(LENGTHS, WarmupLimits(), config, bytes_per_token=1000, **arguments)
    return limits.capacity_tokens


def test_the_memory_of_the_container_counts_not_that_of_the_machine(
    tiny_model, resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolved(tiny_model("llama"), cache={"memory_fraction": 0.5})
    container = DeviceMemory(total_bytes=9_000_000, free_bytes=4_000_000, is_host=True)
    monkeypatch.setattr(contiguous_sizing, "read_device_memory", lambda device: container)
    assert capacity(config, activation_bytes=0) == 1000


def test_memory_that_is_given_is_not_read(tiny_model, resolved) -> None:
    config = resolved(tiny_model("llama"), cache={"memory_fraction": 0.5})
    gpu = DeviceMemory(total_bytes=20_000_000, free_bytes=16_000_000, is_host=False)
    assert capacity(config, activation_bytes=1_000_000, memory=gpu, used_bytes=4_000_000) == 5000
