"""The arithmetic of a contiguous cache's capacity, without a model."""

from __future__ import annotations

import pytest

from pagedkv.adapters.transformers import contiguous_sizing
from pagedkv.adapters.transformers.contiguous_sizing import compute_capacity
from pagedkv.plugin.limits import ResolvedLimits
from pagedkv.plugin.memory import DeviceMemory

LIMITS = ResolvedLimits(
    127, 128, max_prefill_tokens=2048, max_step_tokens=2048, max_num_sequences=256, min_cache_tokens=2
)


def capacity(config, **arguments) -> int:
    return compute_capacity(LIMITS, config, bytes_per_token=1000, **arguments).num_tokens


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
