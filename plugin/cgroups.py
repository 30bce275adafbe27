"""Finds the control groups of this process (version 1 and 2 of cgroups): they hold the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folder: Path
    is_v2: bool

    def read(self, name: str) -> str:
        """The text of one of its files, without spaces around it; empty if there is no such file."""
        return read_text(self.folder / name).strip()


def list_control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[ControlGroup]:
    """Yields this process's group and every group above it, up to the root.

    Args:
        controller: "memory" or "cpu". Groups of version 2 have all controllers.
        proc, cgroups: where the system shows processes and groups.
    """
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _find_root(controller, controllers, cgroups)
        # In a container the path may be the host's and not exist here; the root is then the container's own group.
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            yield ControlGroup(folder, is_v2=not controllers)
            if folder == root:
                break


def _find_root(controller: str, controllers: str, cgroups: Path) -> Path:
    """Version 1 mounts a controller on its own, or with those that share its tree, as in `cpu,cpuacct`."""
    if not controllers:
        return cgroups
    joined = cgroups / controllers
    return joined if joined.is_dir() else cgroups / controller


def read_text(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
