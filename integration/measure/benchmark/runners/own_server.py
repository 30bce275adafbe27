"""A server of ours in a process of its own, for the runners that call it."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedkv.integration.serve.child_process import ChildServer, child_server


@contextmanager
def own_server(options: dict[str, Any], arguments: Sequence[str]) -> Iterator[ChildServer]:
    """Context manager that runs a server.

    Args:
        options: those of `InProcessEngine`.
        arguments: of `pagedkv serve`; "{folder}" stands for a folder that is removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="pagedkv-") as folder:
        command = [argument.format(folder=folder) for argument in arguments]
        command += [part for key, value in options["overrides"].items() for part in ("--set", f"{key}={value}")]
        if options["config_file"]:
            command += ["--config", options["config_file"]]
        with child_server(command, Path(folder, "log")) as server:
            yield server


def describe_server(server: ChildServer, protocol: str) -> dict[str, Any]:
    """The facts about an engine that a runner reports."""
    return {
        "engine": f"pagedkv {server.summary['backend']}, through {protocol}",
        "version": importlib.metadata.version("pagedkv"),
        "dtype": server.summary["dtype"],
        "kv_dtype": server.summary["kv_dtype"],
        "attention": server.summary["attention_kernels"],
        "threads": server.summary["num_threads"],
        "kv_cache_bytes": server.summary["kv_bytes_total"],
    }
