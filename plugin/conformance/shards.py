"""Runs code in several processes as shards of one model, and reports how each of them ended.

For use in scripts: the processes are forked, so that libraries are loaded once, and a process that has run threads of
torch or gRPC must not be forked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedkv.plugin.distributed import ShardGroup, ShardInfo, join_shards

_POLL_S = 0.01
_EXIT_FAILED = 3


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """How one shard ended."""

    code: int
    """Exit code: 0, or 3 after a failure of the group, or negative for the signal that ended it."""
    result: Any
    """What the body returned, after a round trip through JSON; None if it did not return."""
    failure: str
    """The message that the failure handler got."""
    duration_s: float
    """Time from the start of all shards to the end of this one."""


def run_shards(
    body: Callable[[ShardGroup], Any], num_shards: int = 2, *, step_timeout_s: float = 30.0, timeout_s: float = 120.0
) -> list[ShardOutcome]:
    """Forks shards that join over gloo and run `body`; waits for all, and kills those that run too long."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started_s = time.monotonic()
        pids = []
        for rank in range(num_shards):
            pid = os.fork()
            if pid == 0:
                _run_shard(body, ShardInfo(rank, num_shards), port, folder, step_timeout_s)
            pids.append(pid)
        ends = _wait(pids, started_s, timeout_s)
        return [
            ShardOutcome(code, _read(folder / f"result-{rank}"), _read(folder / f"failure-{rank}") or "", duration_s)
            for rank, (code, duration_s) in enumerate(ends)
        ]


def _run_shard(
    body: Callable[[ShardGroup], Any], shard: ShardInfo, port: int, folder: Path, step_timeout_s: float
) -> None:
    def end(message: str) -> None:
        (folder / f"failure-{shard.rank}").write_text(json.dumps(message))
        os._exit(_EXIT_FAILED)

    code = 1
    try:
        torch.set_num_threads(1)
        group = join_shards(shard, "127.0.0.1", port, device_type="cpu", on_failure=end, step_timeout_s=step_timeout_s)
        (folder / f"result-{shard.rank}").write_text(json.dumps(body(group)))
        group.leave()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], started_s: float, timeout_s: float) -> list[tuple[int, float]]:
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < len(pids):
        for pid in set(pids) - set(ends):
            ended, status = os.waitpid(pid, os.WNOHANG)
            duration_s = time.monotonic() - started_s
            if ended:
                ends[pid] = (os.waitstatus_to_exitcode(status), duration_s)
            elif duration_s > timeout_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return [ends[pid] for pid in pids]


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
