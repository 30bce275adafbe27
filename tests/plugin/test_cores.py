"""Cores and CPU quota, read from files as systems and containers show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedkv.plugin.cores import read_cpu_quota, read_cpu_share, split_cores


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quota_cpus"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("", {}, None),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "200000 50000\n"}, 4.0),
        ("4:cpu:/\n3:memory:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "250000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 2.5),
        (
            "4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "4:cpuacct,cpu:/of/the/host\n",
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1.0,
        ),
        ("0::/\n", {"cpu.max": "broken\n"}, None),
    ],
)
def test_the_quota_is_the_lowest_of_the_groups_of_either_version(
    tmp_path: Path, membership: str, files: dict[str, str], quota_cpus: float | None
) -> None:
    write_files(tmp_path / "proc", {"self/cgroup": membership})
    write_files(tmp_path / "cgroup", files)
    assert read_cpu_quota(tmp_path / "proc", tmp_path / "cgroup") == quota_cpus


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_one_core_are_one_core(tmp_path: Path, name: str) -> None:
    siblings = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}
    write_files(tmp_path, {f"cpu{cpu}/topology/{name}": f"{text}\n" for cpu, text in siblings.items()})
    none = tmp_path / "none"
    assert read_cpu_share(range(8), tmp_path, none, none).cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert read_cpu_share([1, 2, 5], tmp_path, none, none).cores == ((1, 5), (2,))


def test_without_a_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert read_cpu_share([3, 1], tmp_path, tmp_path, tmp_path).cores == ((1,), (3,))


def test_the_cores_of_this_machine_are_those_of_the_affinity() -> None:
    assert {cpu for core in read_cpu_share().cores for cpu in core} == os.sched_getaffinity(0)


def test_processes_get_the_same_number_of_neighbouring_cores_each() -> None:
    assert split_cores([(0, 8), (1, 9), (2, 10), (3, 11)], 2) == [[0, 8, 1, 9], [2, 10, 3, 11]]
    assert split_cores([(0,), (1,), (2,)], 2) == [[0], [1]]
    assert split_cores([(0,)], 2) == [[], []]
