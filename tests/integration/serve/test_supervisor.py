"""Processes that stand for shards: started with their rank, joined into one summary, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pagedkv.integration.serve import supervisor
from pagedkv.integration.serve.process import ServerSummary
from pagedkv.integration.serve.shards import EXIT_SHARD_FAILED
from pagedkv.integration.serve.supervisor import supervise

SHARD = """
import json, os, sys, time
rank = int(sys.argv[sys.argv.index("--rank") + 1])
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
behaviour = sys.argv[1:][rank]
if behaviour == "fails":
    sys.exit(5)
texts = dict.fromkeys(("model", "architecture", "dtype", "device", "backend", "attention_kernels", "kv_dtype"), "x")
names = ("block_size", "num_blocks", "max_cache_tokens", "max_total_tokens", "kv_bytes_total", "num_threads")
numbers = dict.fromkeys(names, 8)
print("a library greets\\n" * (20_000 if behaviour == "chats" else 1), flush=True)
with open(int(sys.argv[sys.argv.index("--ready-fd") + 1]), "w") as pipe:
    print("{}", end="", flush=True)
    summary = {"event": "ready", "metrics_urls": [], "targets": [f"unix:s-{rank}"], **texts, **numbers}
    print(json.dumps(summary), file=pipe)
if behaviour == "is killed":
    os.kill(os.getpid(), 9)
if behaviour == "fails later":
    time.sleep(0.5)
    sys.exit(3)
if behaviour == "ends":
    sys.exit(0)
time.sleep(60)
"""


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a shard; arguments say what each rank does."""
    monkeypatch.setattr(supervisor, "_DRAINED_END_S", 1.0)
    monkeypatch.setattr(supervisor, "_FAILED_END_S", 1.0)
    script = tmp_path / "shard.py"
    script.write_text(SHARD)
    return [sys.executable, str(script)]


def test_all_shards_are_announced_as_one_server_and_end_when_one_does(shard: list[str]) -> None:
    announced: list[ServerSummary] = []
    started_s = time.monotonic()
    code = supervise([*shard, "stays", "ends"], 2, announced.append)
    assert time.monotonic() - started_s < 30
    (summary,) = announced
    assert summary.targets == ("unix:s-0", "unix:s-1")
    assert (summary.kv_bytes_total, summary.max_cache_tokens) == (16, 8)
    assert code == 128 + signal.SIGTERM  # the shard that was still there does not handle it


def test_shard_that_fails_before_it_is_ready_ends_all_with_its_code(shard: list[str]) -> None:
    announced: list[ServerSummary] = []
    assert supervise([*shard, "stays", "fails"], 2, announced.append) == 5
    assert announced == []


def test_shard_that_prints_ever_so_much_is_ready_all_the_same(shard: list[str]) -> None:
    announced: list[ServerSummary] = []
    assert supervise([*shard, "chats", "ends"], 2, announced.append) == 128 + signal.SIGTERM
    assert len(announced) == 1


@pytest.mark.parametrize(
    "behaviours", [("is killed", "fails later"), ("fails later", "is killed"), ("is killed", "stays")]
)
def test_killed_shard_has_one_exit_code_whoever_is_seen_to_end_first(shard: list[str], behaviours) -> None:
    assert supervise([*shard, *behaviours], 2, lambda summary: None) == EXIT_SHARD_FAILED


def test_signal_reaches_every_shard(shard: list[str]) -> None:
    def announce(summary: ServerSummary) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    assert supervise([*shard, "stays", "stays"], 2, announce) == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process of its parent's end")
def test_supervisor_that_is_killed_leaves_no_shard_behind(shard: list[str]) -> None:
    script = f"""
from pagedkv.integration.serve.supervisor import supervise
supervise({[*shard, "stays", "stays"]!r}, 2, lambda summary: print("ready", flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        shards = psutil.Process(supervisor.pid).children()
        supervisor.kill()
    assert len(shards) == 2
    _, alive = psutil.wait_procs(shards, timeout=10)
    assert alive == []
