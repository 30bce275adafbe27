"""Memory as the device, the system and the container tell it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.memory import (
    DeviceMemory,
    compute_pool_bytes,
    format_bytes,
    parse_bytes,
    read_device_memory,
    read_host_memory,
)

GIB = 2**30


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
    memory = read_device_memory(torch.device("cpu"))
    assert memory.is_host
    assert 0 < memory.free_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 * GIB), ("1.5 GiB", 3 * 2**29), ("24GB", 24 * 10**9), ("512", 512)]
)
def test_sizes_are_read_as_in_the_config(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--device-memory") == num_bytes


def test_what_is_no_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--device-memory.*80 cows"):
        parse_bytes("80 cows", "--device-memory")


def test_sizes_are_written_in_the_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (12, 100 * 1000, 80 * GIB)] == ["12 B", "97.66 KiB", "80 GiB"]
