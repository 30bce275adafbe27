"""Memory of a device and of this process's container, and how much of it a KV cache may use.

Used by the paged backend, the contiguous one and `pagedkv plan`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from pagedkv.plugin.cgroups import CGROUPS, PROC, ControlGroup, list_control_groups, read_text
from pagedkv.plugin.errors import ConfigError

_SIZE = TypeAdapter(ByteSize)

MAX_HOST_SHARE = 0.5
"""Largest share of the available host memory. Other programs need some too, and swapping is worse than a small pool."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device as it is now."""

    total_bytes: int
    free_bytes: int
    """Unused memory; for host memory, what is available without swapping."""
    is_host: bool


def compute_pool_bytes(fraction: float, memory: DeviceMemory, *, used_bytes: int, activation_bytes: int) -> int:
    """Bytes of the pool by `cache.memory_fraction`; at least 0.

    On a GPU, weights, activations and pool together may use `fraction` of all its memory, as far as other programs
    leave it free. On a host, the pool may use `fraction` of half of the free memory, from which weights are already
    subtracted.
    """
    if memory.is_host:
        return max(0, int(memory.free_bytes * MAX_HOST_SHARE * fraction) - activation_bytes)
    allowed_bytes = int(memory.total_bytes * fraction) - used_bytes
    return max(0, min(allowed_bytes, memory.free_bytes) - activation_bytes)


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Reads a device's memory: from CUDA (or ROCm) for a GPU, else from the operating system.

    Raises:
        ConfigError: the operating system does not report it.
    """
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes, free_bytes, is_host=False)
    return read_host_memory()


def read_host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> DeviceMemory:
    """Reads the memory of this machine, or of its container (cgroup v1 or v2) if that is less.

    Raises:
        ConfigError: neither /proc nor sysconf reports it.
    """
    total_bytes, free_bytes = _read_meminfo(proc) or _read_sysconf()
    for limit_bytes, taken_bytes in _read_cgroup_limits(proc, cgroups):
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(0, limit_bytes - taken_bytes))
    return DeviceMemory(total_bytes, free_bytes, is_host=True)


def _read_meminfo(proc: Path) -> tuple[int, int] | None:
    text = read_text(proc / "meminfo")
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in text.splitlines())}
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return None
    return int(fields["MemTotal"][0]) * 1024, int(fields["MemAvailable"][0]) * 1024


def _read_sysconf() -> tuple[int, int]:
    try:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise ConfigError(
            "this system does not tell how much memory it has; give the pool a size with cache.memory"
        ) from None
    return total_bytes, total_bytes


def _read_cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, used) in bytes of this process's group and of every group above it."""
    for group in list_control_groups("memory", proc, cgroups):
        limit = group.read("memory.max" if group.is_v2 else "memory.limit_in_bytes")
        taken = group.read("memory.current" if group.is_v2 else "memory.usage_in_bytes")
        if limit.isdigit() and taken.isdigit():
            yield int(limit), int(taken) - _read_reclaimable_bytes(group)


def _read_reclaimable_bytes(group: ControlGroup) -> int:
    """File pages that the kernel can drop. Without this a checkpoint that was just read would count as used memory."""
    stat = dict(line.split(" ", 1) for line in group.read("memory.stat").splitlines() if " " in line)
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def parse_bytes(text: str, what: str) -> int:
    """Parses a size as in the config file: "80GiB", "24GB", "512".

    Args:
        what: name of the size for the error message, for example "--device-memory".

    Raises:
        ConfigError: the text is not a size.
    """
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError:
        raise ConfigError(f'{what} is a size, as in "80GiB"; found {text!r}') from None


def format_bytes(num_bytes: float) -> str:
    """Formats a size for people: 97.66 KiB, 4 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
