"""The processor cores that this process may use: its affinity, and the quota of its container.

Imports no torch: what depends on cores is set before the threads of math libraries start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv.plugin.cgroups import CGROUPS, PROC, list_control_groups, read_text

SYSTEM_CPUS = Path("/sys/devices/system/cpu")

Core = tuple[int, ...]
"""The numbers of a core's CPUs: several if it runs several hardware threads."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What of the machine's processors a process may use."""

    cores: tuple[Core, ...]
    """By number. Of each core those CPUs that the affinity allows."""
    quota_cpus: float | None = None
    """CPU time a second of wall time that the container may use; None without a limit."""

    @property
    def has_low_quota(self) -> bool:
        """Whether the quota is for fewer CPUs than there are cores."""
        return self.quota_cpus is not None and self.quota_cpus < len(self.cores)


def read_cpu_share(
    cpus: Sequence[int] | None = None, system: Path = SYSTEM_CPUS, proc: Path = PROC, cgroups: Path = CGROUPS
) -> CpuShare:
    """Reads what this process may use.

    Args:
        cpus: numbers of the CPUs of its affinity; None asks the system.
    """
    allowed = sorted(_read_affinity() if cpus is None else cpus)
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        topology = system / f"cpu{cpu}" / "topology"
        # The second is the first's name before Linux 5.
        siblings = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        cores.setdefault(siblings or f"{cpu}\n", []).append(cpu)
    return CpuShare(tuple(tuple(core) for core in cores.values()), read_cpu_quota(proc, cgroups))


def read_cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Reads the lowest CPU quota of this process's control groups, in CPUs; None if none of them has one."""
    quotas = []
    for group in list_control_groups("cpu", proc, cgroups):
        if group.is_v2:
            quota, _, period = group.read("cpu.max").partition(" ")
        else:
            quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
        # Without a limit the quota is "max", or -1.
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def split_cores(cores: Sequence[Core], num_processes: int) -> list[list[int]]:
    """The CPUs of each of several processes: as many neighbouring cores for each, or none if there are too few.

    >>> split_cores([(0,), (1,), (2,), (3,), (4,)], 2), split_cores([(0, 2), (1, 3)], 2), split_cores([(0,)], 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[], []])
    """
    size = len(cores) // num_processes
    return [
        [cpu for core in cores[index * size : (index + 1) * size] for cpu in core] for index in range(num_processes)
    ]


def _read_affinity() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return list(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
