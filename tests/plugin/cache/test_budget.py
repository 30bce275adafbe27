from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.plugin.cache import budget
from pagedkv.plugin.cache.budget import agree_on_minimum, size_pool
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.memory import DeviceMemory
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBudget, MemoryBytes, MemoryFraction

CPU = torch.device("cpu")


SIZE_ON_RANK = """
import sys
import torch
from torch import distributed
from pagedkv.plugin.cache.budget import size_pool
from pagedkv.plugin.resolved_config import MemoryBlocks
from pagedkv.plugin.errors import CapacityError

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for min_num_blocks in (1, 40):
    try:
        print(
            size_pool(
                MemoryBlocks(50 - 20 * rank),
                torch.device("cpu"),
                bytes_per_block=1000,
                used_bytes=0,
                activation_bytes=0,
                min_num_blocks=min_num_blocks,
            )
        )
    except CapacityError as error:
        print(error)
distributed.destroy_process_group()
"""


def size(memory_budget: MemoryBudget, min_num_blocks: int = 1, max_num_blocks: int | None = None) -> int:
    return size_pool(
        memory_budget,
        CPU,
        bytes_per_block=1000,
        used_bytes=0,
        activation_bytes=0,
        min_num_blocks=min_num_blocks,
        max_num_blocks=max_num_blocks,
    )


def test_a_size_in_blocks_or_bytes_is_taken_as_it_is() -> None:
    assert size(MemoryBlocks(7), max_num_blocks=3) == 7
    assert size(MemoryBytes(7999), max_num_blocks=3) == 7


def test_a_fraction_of_memory_is_never_more_than_what_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(total_bytes=10**6, free_bytes=10**5, is_host=True)
    monkeypatch.setattr(budget, "read_device_memory", lambda device: memory)
    assert size(MemoryFraction(0.8)) == 40
    assert size(MemoryFraction(0.8), max_num_blocks=30) == 30


@pytest.mark.parametrize(
    ("memory_budget", "key"),
    [
        (MemoryBlocks(3), "cache.num_blocks"),
        (MemoryBytes(3500), "cache.memory"),
        (MemoryFraction(1e-9), "cache.memory_fraction"),
    ],
)
def test_a_pool_too_small_for_one_request_says_by_how_much_and_what_to_change(
    memory_budget: MemoryBudget, key: str
) -> None:
    with pytest.raises(CapacityError, match=rf"takes 100 blocks \(97.66 KiB\).*{key} .*max_total_tokens"):
        size(memory_budget, min_num_blocks=100)


def test_one_process_agrees_with_itself() -> None:
    assert agree_on_minimum(12) == 12


def test_two_ranks_whose_memory_differs_use_the_smaller_pool_and_fail_alike(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SIZE_ON_RANK, str(rank), str(tmp_path / "store")],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [output.splitlines()[0] for output in outputs] == ["30", "30"]
    assert all("takes 40 blocks" in output.splitlines()[1] for output in outputs)
