"""Describes the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]  # its stubs are in the extra dev

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "i8mm")
"""Instruction sets that decide how fast products are."""


@dataclass(frozen=True, slots=True)
class Machine:
    processor: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    instructions: tuple[str, ...]
    system: str
    python: str

    def describe(self) -> str:
        instructions = ", ".join(self.instructions) or "no vector instructions known"
        return (
            f"{self.cores} cores of {self.processor} ({instructions}), {self.memory_bytes / 2**30:.0f} GiB, "
            f"{self.system}, Python {self.python}"
        )


def describe_machine() -> Machine:
    name, flags = _read_cpuinfo()
    return Machine(
        processor=name or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        instructions=tuple(one for one in _INSTRUCTIONS if one in flags),
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        python=platform.python_version(),
    )


def _read_cpuinfo() -> tuple[str, set[str]]:
    """Reads model name and flags of the first processor; empty if Linux does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "", set()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return values.get("model name", ""), set(values.get("flags", values.get("Features", "")).split())
