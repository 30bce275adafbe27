"""The number of threads, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.plugin.cores import CpuShare
from pagedkv.plugin.threads import choose_threads, wastes_quota

SHORT_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}


def machine(num_cores: int, quota_cpus: float | None = None) -> CpuShare:
    return CpuShare(tuple((cpu,) for cpu in range(num_cores)), quota_cpus)


@pytest.mark.parametrize(
    ("share", "num_processes", "num_threads", "reason"),
    [
        (machine(2), 1, 2, "2 cores"),
        (machine(1), 1, 1, "1 core"),
        (machine(2, 1.0), 1, 1, "a quota of 1 CPU, of 2 cores"),
        (machine(64, 4.0), 1, 4, "a quota of 4 CPUs, of 64 cores"),
        (machine(2, 0.5), 1, 1, "a quota of 0.5 CPUs, of 2 cores"),
        (machine(2, 1.5), 1, 1, "a quota of 1.5 CPUs, of 2 cores"),
        (machine(2, 1.9), 1, 2, "a quota of 1.9 CPUs, of 2 cores"),
        (machine(2, 8.0), 1, 2, "2 cores"),
        (machine(8), 2, 4, "8 cores, for 2 processes"),
        (machine(8, 5.0), 2, 2, "a quota of 5 CPUs, of 8 cores, for 2 processes"),
        (machine(2), 3, 1, "2 cores, for 3 processes"),
    ],
)
def test_threads_follow_cores_quota_and_processes(
    share: CpuShare, num_processes: int, num_threads: int, reason: str
) -> None:
    choice = choose_threads("auto", num_processes, share, {})
    assert (choice.num_threads, choice.reason) == (num_threads, reason)


def test_a_number_that_someone_set_wins() -> None:
    choice = choose_threads(7, 2, machine(4, 1.0), {"OMP_NUM_THREADS": "3"})
    assert (choice.num_threads, choice.reason) == (7, "model.threads")
    choice = choose_threads("auto", 2, machine(4, 1.0), {"OMP_NUM_THREADS": "3,2"})
    assert (choice.num_threads, choice.reason) == (3, "OMP_NUM_THREADS")


@pytest.mark.parametrize("text", ["", "0", "many", "-1"])
def test_a_variable_without_a_number_sets_none(text: str) -> None:
    assert choose_threads("auto", 1, machine(4), {"OMP_NUM_THREADS": text}).num_threads == 4


PROGRAM = """
import os, sys
from pagedkv.plugin.cores import CpuShare
from pagedkv.plugin.threads import spare_quota
if "late" in sys.argv:
    import torch
spare_quota(os.environ, CpuShare(((0,), (1,)), float(sys.argv[1])))
import torch
print({name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME") if name in os.environ})
"""


def run_program(*arguments: str, **variables: str) -> tuple[str, str]:
    """Returns what OpenMP says of itself when it is loaded, and the variables then."""
    environ = {name: value for name, value in os.environ.items() if name not in SHORT_WAIT}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**environ, "OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "2", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, done.stdout.strip()


def test_under_a_low_quota_openmp_is_loaded_with_threads_that_soon_sleep() -> None:
    told, variables = run_program("1.5")
    assert variables == str(SHORT_WAIT)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told
    assert "GOMP_SPINCOUNT = '2000'" in told


def test_without_a_low_quota_or_after_torch_or_against_a_set_variable_nothing_changes() -> None:
    assert run_program("2")[1] == "{}"
    assert run_program("1.5", "late")[1] == "{}"
    assert run_program("1.5", GOMP_SPINCOUNT="7")[1] == "{'GOMP_SPINCOUNT': '7'}"


def test_a_program_that_loaded_torch_first_is_told_that_threads_spin() -> None:
    two, one = choose_threads(2), choose_threads(1)
    assert wastes_quota(two, {}, machine(4, 2.0))
    assert not wastes_quota(one, {}, machine(4, 1.0))
    assert not wastes_quota(two, SHORT_WAIT, machine(4, 2.0))
    assert not wastes_quota(two, {}, machine(4))


@pytest.mark.parametrize("module", ["pagedkv.integration.cli.main", "pagedkv.integration.serve.launcher_command"])
def test_commands_begin_before_torch_is_loaded(module: str, tmp_path: Path) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 0
