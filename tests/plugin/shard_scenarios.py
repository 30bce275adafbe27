"""Shards over the token model, which no weights split: real groups, backends, schedulers. Prints outcomes as JSON.

A script of its own because its processes are forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.shards import run_shards
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.distributed import ShardGroup
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.requests import Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import resolve_config


class FailingModel(TokenModel):
    """Fails on one shard, once it is told to."""

    is_broken = False

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        if self.is_broken:
            raise ArithmeticError("a fault of this shard alone")
        return super().forward(batch, attention)


def make_backend(model: TokenModel, budget: dict[str, Any] | None = None) -> PagedBackend:
    overrides = {"model.path": "none", "cache.block_size": 8} | (budget or {"cache.num_blocks": 24})
    config = resolve_config(load_config(None, overrides, {}), model.spec)
    backend = PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))
    backend.warmup(WarmupLimits())
    return backend


def prompt(index: int) -> Request:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, do_sample=index % 2 == 0)
    return Request(RequestId(index), [1, 2, 3, 4, 5, 6, 7, 8, 9 + index, 3 + index], params)


def run_to_end(backend: PagedBackend) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while backend.has_unfinished():
        for output in backend.step():
            tokens.setdefault(int(output.request_id), []).append(output.token.token_id)
    return tokens


def agree(group: ShardGroup) -> dict[str, Any]:
    backend = make_backend(TokenModel())
    backend.add([prompt(index) for index in range(16)])
    tokens = run_to_end(backend)
    return {"tokens": tokens, "stats": dict(backend.stats())}


def gather(group: ShardGroup) -> list[int]:
    return group.gather(group.info.rank - 2**63)


def different_memory(group: ShardGroup) -> dict[str, Any]:
    backend = make_backend(TokenModel(), {"cache.num_blocks": 30 - 10 * group.info.rank})
    backend.add([prompt(index) for index in range(16)])
    run_to_end(backend)
    return dict(backend.stats())


def too_little_memory_on_one(group: ShardGroup) -> str:
    try:
        make_backend(TokenModel(), {"cache.memory": 1 if group.info.rank == 1 else 10**6})
    except CapacityError as error:
        return str(error)
    return ""


def graphs_on_one_shard_alone(group: ShardGroup) -> list[bool]:
    """Whether batches are padded when both shards can do so, and when one can't."""
    config = resolve_config(load_config(None, {"model.path": "none", "cache.num_blocks": 24}, {}), TokenModel().spec)
    has_padded_decodes = []
    for can_capture in (True, group.info.rank == 0):
        kernels = load_plugin(KERNELS, "reference").create(torch.device("cpu"))
        kernels.can_capture_graphs = can_capture
        backend = PagedBackend(replace(config, graph_batch_sizes=(1, 4)), TokenModel(), kernels)
        backend.warmup(WarmupLimits())
        backend.add([prompt(index) for index in range(3)])
        run_to_end(backend)
        has_padded_decodes.append(backend._executor.has_padded_decodes)
    return has_padded_decodes


def different_requests(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([prompt(0)])
    backend.step()
    backend.add([prompt(1 + group.info.rank)])
    run_to_end(backend)


def different_tokens(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([Request(RequestId(0), [5, 6, 7 + group.info.rank], SamplingParams(max_new_tokens=4))])
    run_to_end(backend)


def call_on_one_shard(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([prompt(0)])
    if group.info.rank == 0:
        backend.step()
    time.sleep(20)


def fault_on_one_shard(group: ShardGroup) -> None:
    model = FailingModel()
    backend = make_backend(model)
    backend.add([prompt(0)])
    model.is_broken = group.info.rank == 1
    run_to_end(backend)
    time.sleep(20)


def kill_one_while_idle(group: ShardGroup) -> None:
    make_backend(TokenModel())
    if group.info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


def kill_the_first_of_three_in_a_step(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([prompt(0)])
    if group.info.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    run_to_end(backend)
    time.sleep(20)


def kill_the_last_of_three_in_a_step(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([prompt(0)])
    if group.info.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    run_to_end(backend)
    time.sleep(20)


def step_after_one_has_left(group: ShardGroup) -> None:
    backend = make_backend(TokenModel())
    backend.add([prompt(0)])
    if group.info.rank == 1:
        return
    time.sleep(0.5)
    backend.step()


SCENARIOS: dict[Callable[[ShardGroup], Any], dict[str, Any]] = {
    agree: {},
    gather: {},
    different_memory: {},
    too_little_memory_on_one: {},
    graphs_on_one_shard_alone: {},
    different_requests: {},
    different_tokens: {},
    call_on_one_shard: {"step_timeout_s": 1.0},
    fault_on_one_shard: {},
    kill_one_while_idle: {},
    kill_the_first_of_three_in_a_step: {"num_shards": 3},
    kill_the_last_of_three_in_a_step: {"num_shards": 3},
    step_after_one_has_left: {},
}


if __name__ == "__main__":
    outcomes = {body.__name__: run_shards(body, **options) for body, options in SCENARIOS.items()}
    json.dump({name: [asdict(shard) for shard in shards] for name, shards in outcomes.items()}, sys.stdout)
