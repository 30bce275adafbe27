"""How many threads compute on the CPU, and whether they spin while they wait for one another.

Imports no torch: OpenMP reads its environment once, when torch loads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pagedkv.plugin.cores import CpuShare, read_cpu_share

THREADS_VARIABLE = "OMP_NUM_THREADS"

_SHORT_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""Variables with which waiting threads soon sleep: any OpenMP's; of GNU's, which spins some 50 µs instead of 7 ms; and
of Intel's and LLVM's. To sleep at once made decode steps 1.4 times as long: most waits are shorter than a wake-up."""

_QUOTA_MARGIN_CPUS = 0.1
"""A quota that is so close below a whole number of CPUs counts as it."""


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    num_threads: int
    reason: str
    """For the log: what the number follows from."""


def choose_threads(
    written: int | str,
    num_processes: int = 1,
    share: CpuShare | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ThreadChoice:
    """Chooses the number of threads of each of several equal processes.

    It is the number of cores in the affinity, or the container's CPU quota if that is lower, divided by the processes.
    A quota is rounded down, to at least 1: more threads use it up, and all of them are stopped until the next period.

    Args:
        written: `model.threads`; a number wins over all else, and OMP_NUM_THREADS over what the machine has.
        num_processes: on this machine, with the affinity and the quota of this one.
        share: what they may use; None reads it.
    """
    if isinstance(written, int):
        return ThreadChoice(written, "model.threads")
    named = read_named_threads(environ)
    if named is not None:
        return ThreadChoice(named, THREADS_VARIABLE)
    share = share or read_cpu_share()
    available = len(share.cores)
    reason = "1 core" if available == 1 else f"{available} cores"
    if share.has_low_quota:
        assert share.quota_cpus is not None
        available = int(share.quota_cpus + _QUOTA_MARGIN_CPUS)
        cpus = "CPU" if share.quota_cpus == 1 else "CPUs"
        reason = f"a quota of {share.quota_cpus:g} {cpus}, of {reason}"
    if num_processes > 1:
        reason += f", for {num_processes} processes"
    return ThreadChoice(max(1, available // num_processes), reason)


def read_named_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number that OMP_NUM_THREADS sets (of a list, one for each level of nesting, the first); None without."""
    first = environ.get(THREADS_VARIABLE, "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else None


def spare_quota(environ: MutableMapping[str, str] = os.environ, share: CpuShare | None = None) -> None:
    """Makes waiting threads sleep soon if a CPU quota is lower than the number of cores: spinning would use it up.

    Does nothing if the environment says already how threads wait, or if torch is loaded, which is too late.
    """
    if "torch" not in sys.modules and not _says_how_to_wait(environ) and (share or read_cpu_share()).has_low_quota:
        environ.update(_SHORT_WAIT)


def wastes_quota(choice: ThreadChoice, environ: Mapping[str, str] = os.environ, share: CpuShare | None = None) -> bool:
    """Whether threads spin within a low quota, because torch was loaded before `spare_quota` was called."""
    is_alone = choice.num_threads == 1
    return not is_alone and not _says_how_to_wait(environ) and (share or read_cpu_share()).has_low_quota


def _says_how_to_wait(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _SHORT_WAIT)
