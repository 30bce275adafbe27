from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.plugin.cache import budget
from pagedkv.plugin.cache.budget import (
    DeviceMemory,
    agree_on_minimum,
    compute_pool_bytes,
    read_device_memory,
    read_host_memory,
    size_pool,
)
from pagedkv.plugin.errors import CapacityError, ConfigError
from pagedkv.plugin.resolved_config import MemoryBlocks, MemoryBudget, MemoryBytes, MemoryFraction

CPU = torch.device("cpu")
GIB = 2**30


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


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_gpu_is_shared_by_weights_activations_and_pool() -> None:
    memory = DeviceMemory(total_bytes=80 * GIB, free_bytes=64 * GIB, is_host=False)
    assert compute_pool_bytes(0.9, memory, used_bytes=16 * GIB, activation_bytes=2 * GIB) == 54 * GIB


def test_what_other_processes_hold_of_a_gpu_is_not_planned_with() -> None:
    memory = DeviceMemory(total_bytes=80 * GIB, free_bytes=30 * GIB, is_host=False)
    assert compute_pool_bytes(0.9, memory, used_bytes=16 * GIB, activation_bytes=2 * GIB) == 28 * GIB


def test_of_host_memory_half_of_what_is_available_is_the_most() -> None:
    memory = DeviceMemory(total_bytes=64 * GIB, free_bytes=40 * GIB, is_host=True)
    assert compute_pool_bytes(1.0, memory, used_bytes=9 * GIB, activation_bytes=GIB) == 19 * GIB
    assert compute_pool_bytes(0.5, memory, used_bytes=9 * GIB, activation_bytes=GIB) == 9 * GIB


@pytest.mark.parametrize("is_host", [True, False])
def test_a_full_device_leaves_nothing_rather_than_less(is_host: bool) -> None:
    memory = DeviceMemory(total_bytes=8 * GIB, free_bytes=GIB, is_host=is_host)
    assert compute_pool_bytes(0.9, memory, used_bytes=7 * GIB, activation_bytes=2 * GIB) == 0


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


def test_available_memory_is_what_the_system_says(tmp_path: Path) -> None:
    write_files(tmp_path, {"meminfo": "MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:  500 kB\n"})
    memory = read_host_memory(tmp_path, tmp_path / "none")
    assert memory == DeviceMemory(2000 * 1024, 500 * 1024, is_host=True)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            "0::/outer/inner\n",
            {
                "outer/memory.max": "900000",
                "outer/memory.current": "700000",
                "outer/memory.stat": "anon 5\ninactive_file 100000\n",
                "outer/inner/memory.max": "max",
                "outer/inner/memory.current": "600000",
            },
        ),
        (
            "4:cpu:/x\n3:memory:/a/path/of/the/host\n",
            {
                "memory/memory.limit_in_bytes": "900000",
                "memory/memory.usage_in_bytes": "700000",
                "memory/memory.stat": "inactive_file 0\ntotal_inactive_file 100000\n",
            },
        ),
    ],
    ids=["v2-limit-of-an-outer-group", "v1-inside-a-container"],
)
def test_the_limit_of_a_container_holds_and_its_file_pages_count_as_free(
    tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    meminfo = "MemTotal: 2000 kB\nMemAvailable: 1500 kB\n"
    write_files(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": membership})
    write_files(tmp_path / "cgroup", files)
    memory = read_host_memory(tmp_path / "proc", tmp_path / "cgroup")
    assert memory == DeviceMemory(total_bytes=900000, free_bytes=300000, is_host=True)


def test_a_system_without_proc_is_asked_otherwise_or_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert read_host_memory(tmp_path, tmp_path) == DeviceMemory(total_bytes, total_bytes, is_host=True)
    monkeypatch.delattr("os.sysconf")
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        read_host_memory(tmp_path, tmp_path)


def test_the_memory_of_this_machine_is_plausible() -> None:
    memory = read_device_memory(CPU)
    assert memory.is_host
    assert 0 < memory.free_bytes <= memory.total_bytes


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
