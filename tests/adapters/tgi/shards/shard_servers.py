"""Shards of the token model behind gRPC, as processes. Reads commands from standard input, one a line, as JSON:

    {"start": FOLDER, "num_shards": 2, …}    forks shards that listen on FOLDER/tgi-RANK; prints their process ids
    {"wait": SECONDS}                        prints how each has ended: [exit code, failure]; kills what still runs

A program of its own, loaded once: a process that has run threads of gRPC must not be forked.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import ServerSection, load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.distributed import ShardGroup, ShardInfo, join_shards
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

EXIT_FAILED = 3
CLAIM_TIMEOUT_S = 1.0
PR_SET_PDEATHSIG = 1
FIRST_CHARACTER = 31
"""Id 0 is special; 1 to 96 are the characters from the space on."""


class SlowTokenizer:
    """One token a character. Takes up to `max_delay_s` for each text, by chance: shards are ready at other times."""

    all_special_ids = (0,)

    def __init__(self, max_delay_s: float = 0.0) -> None:
        self._max_delay_s = max_delay_s

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(random.uniform(0, self._max_delay_s))
        return [ord(character) - FIRST_CHARACTER for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(id_ + FIRST_CHARACTER) for id_ in token_ids if id_ or not skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Any]) -> str:
        raise NotImplementedError


def make_backend(num_blocks: int) -> PagedBackend:
    overrides = {"model.path": "none", "cache.block_size": 8, "cache.num_blocks": num_blocks}
    model = TokenModel()
    config = resolve_config(load_config(None, overrides, {}), model.spec)
    return PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))


async def serve(folder: Path, group: ShardGroup | None, options: dict[str, Any]) -> bool:
    """Serves until a signal, or another shard's. Returns whether all requests ended by themselves."""
    stop_asked = asyncio.Event()
    shard = group.info if group else ShardInfo()
    config = ServerSection(uds_path=str(folder / "tgi"), **options.get("server", {}))
    tokenizer = SlowTokenizer(options.get("max_delay_s", 0.0))
    server = GenerationServer(
        make_backend(options.get("num_blocks", 24)),
        tokenizer,
        config,
        rank=shard.rank,
        num_shards=shard.num_shards,
        group=group,
        on_drain=stop_asked.set,
    )
    if server._ordered and server._ordered._following:
        server._ordered._following._claim_timeout_s = options.get("claim_timeout_s", CLAIM_TIMEOUT_S)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_asked.set)
    async with server:
        await server.warm_up(WarmupLimits())
        (folder / f"ready-{shard.rank}").touch()
        await stop_asked.wait()
        return await server.drain(options.get("drain_timeout_s", 20.0))


def run_shard(folder: Path, shard: ShardInfo, port: int, options: dict[str, Any]) -> None:
    def end(message: str) -> None:
        (folder / f"failure-{shard.rank}").write_text(message)
        os._exit(EXIT_FAILED)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(folder / f"log-{shard.rank}", os.O_WRONLY | os.O_CREAT), 2)
    code = 1
    try:
        torch.set_num_threads(1)
        group = join_shards(shard, "127.0.0.1", port, device_type="cpu", on_failure=end, step_timeout_s=20.0)
        code = 0 if asyncio.run(serve(folder, group, options)) else 1
        group.leave()
    except BaseException as error:
        (folder / f"failure-{shard.rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def start(folder: Path, num_shards: int, options: dict[str, Any]) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    pids = []
    for rank in range(num_shards):
        pid = os.fork()
        if pid == 0:
            run_shard(folder, ShardInfo(rank, num_shards), port, options)
        pids.append(pid)
    return pids


def wait(folder: Path, pids: list[int], timeout_s: float) -> list[tuple[int, str]]:
    deadline_s = time.monotonic() + timeout_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    failures = [folder / f"failure-{rank}" for rank in range(len(pids))]
    return [
        (codes[pid], failure.read_text() if failure.exists() else "")
        for pid, failure in zip(pids, failures, strict=True)
    ]


def main() -> None:
    folder, pids = Path(), []
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            folder = Path(command.pop("start"))
            pids = start(folder, command.pop("num_shards"), command)
            print(json.dumps(pids), flush=True)
        else:
            print(json.dumps(wait(folder, pids, command["wait"])), flush=True)
            pids = []
    os._exit(0)  # Tearing torch down takes seconds.


if __name__ == "__main__":
    main()
