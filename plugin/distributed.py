"""Shards, the processes that serve one model together: how they join, agree on numbers, and end.

Every shard runs the same calls in the same order, schedules for itself, and computes its part of every layer;
collectives inside the model combine the parts. So all shards must make the same decisions: they agree here on numbers
that could differ (memory, seeds), and compare their decisions at each step. Whoever takes calls in gives them one
order, over `ShardGroup.call_connections`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed

from pagedkv.plugin.errors import ConfigError, ShardError
from pagedkv.plugin.failure_detector import FailureDetector, OnFailure, connect_failure_detector
from pagedkv.plugin.shard_connections import connect_ranks

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longer than any loading of weights. Steps have a separate limit."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A process's rank among the shards of a model, and their number."""

    rank: int = 0
    num_shards: int = 1


class ShardGroup:
    """One shard's connection to the other shards of the model. Use `join_shards` to make it.

    Args:
        info: of this shard.
        run_seed: the same on every shard, 0 ≤ run_seed < 2**64.
        failure_detector: connects the shards.
        step_timeout_s: longest duration of a step, in seconds.
        call_connections: carry the order of calls: sockets to all others on rank 0, to rank 0 alone on the others.
    """

    def __init__(
        self,
        info: ShardInfo,
        run_seed: int,
        failure_detector: FailureDetector,
        step_timeout_s: float,
        call_connections: Mapping[int, socket.socket],
    ) -> None:
        self.info = info
        self.call_connections = call_connections
        self._run_seed = run_seed
        self._failure_detector = failure_detector
        self._step_timeout_s = step_timeout_s

    def derive_seed(self, count: int) -> int:
        """Returns the seed, 0 ≤ seed < 2**64, for a request's number: new in each run, equal on all shards."""
        words = self._run_seed.to_bytes(8, "little") + count.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")

    def gather(self, value: int) -> list[int]:
        """Returns every rank's value (-2**63 ≤ value < 2**63). Blocks until all shards call it.

        Raises:
            ShardError: a shard has left.
        """
        self._refuse_departed()
        own = torch.tensor([value], dtype=torch.int64)
        values = [torch.empty_like(own) for _ in range(self.info.num_shards)]
        torch.distributed.all_gather(values, own)
        return [int(other) for other in values]

    @contextmanager
    def step(self, task: str) -> Iterator[None]:
        """Like `collective`, for a part of a step. Also fails if the body takes longer than `step_timeout_s`."""
        with self._failure_detector.time_limit(self._step_timeout_s, task), self.collective(task):
            yield

    @contextmanager
    def collective(self, task: str, shared_errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Context manager for code in which shards wait for each other: it succeeds on all shards or fails on all.

        Args:
            task: name of the work for error messages, for example "step 17".
            shared_errors: exceptions that all shards raise at the same point, and after which they continue.

        Raises:
            ShardError: the body failed here, or another shard has ended.
        """
        try:
            yield
        except ShardError:
            raise
        except shared_errors:
            raise
        except Exception as error:
            # A shard that dies breaks the collectives of the others: report its end, not the broken collective.
            if not self._failure_detector.wait_for_report():
                self._refuse_departed()
                logger.exception("%s failed", task)
                self._failure_detector.fail(f"{task} failed on rank {self.info.rank}: {type(error).__name__}: {error}")
            raise ShardError(self._failure_detector.failure) from error

    def fail(self, message: str) -> NoReturn:
        """Ends the work of every shard. Raises ShardError if the failure handler returns."""
        self._failure_detector.fail(message)
        raise ShardError(self._failure_detector.failure or message)

    def fail_unless_reported(self, message: str) -> None:
        """As `fail`, where the message may only be the consequence of another shard's end: that is waited for first."""
        if not self._failure_detector.wait_for_report():
            self._failure_detector.fail(message)

    def _refuse_departed(self) -> None:
        for rank in self._failure_detector.departed_ranks():
            self.fail(f"rank {rank} has left: no step can run without it")

    def leave(self, failure: str = "") -> None:
        """Leaves the group: in order, or with a failure that ends the other shards too. A second call does nothing.

        After this every collective step fails.
        """
        global _group
        if _group is not self:
            return
        _group = None
        self._failure_detector.leave(f"rank {self.info.rank} has failed: {failure}" if failure else "")
        for connection in self.call_connections.values():
            connection.close()
        torch.distributed.destroy_process_group()


_group: ShardGroup | None = None


def joined_group() -> ShardGroup | None:
    """Returns the group that this process has joined; None if it serves a model alone.

    A process has one group, as it has one default group of torch.distributed, over which models are split.
    """
    return _group


def join_shards(
    info: ShardInfo,
    host: str,
    port: int,
    *,
    device_type: str,
    on_failure: OnFailure,
    join_timeout_s: float = 120.0,
    step_timeout_s: float = 120.0,
) -> ShardGroup:
    """Joins the other shards of a model: torch.distributed over gloo on CPUs, and NCCL beside it on GPUs.

    Args:
        info: of this shard, of at least two.
        host, port: where rank 0 listens (MASTER_ADDR, MASTER_PORT).
        device_type: "cpu" or "cuda", the same for all.
        on_failure: called once, from any thread, when this or another shard has failed. It should end the process:
            threads may be blocked in a collective forever.
        join_timeout_s: how long to wait for the others.
        step_timeout_s: how long one step may take before it counts as failed.

    Raises:
        ConfigError: the address can't be used, or the shards have different devices.
        ShardError: some shards did not join in time; the message names them if they are known.
    """
    global _group
    assert _group is None, "one group a process"
    store = _connect_store(info, host, port, join_timeout_s)
    failure_detector = connect_failure_detector(info.rank, info.num_shards, store, host, join_timeout_s, on_failure)
    try:
        _refuse_mixed_devices(info, store, device_type)
        run_seed = _agree_on_seed(info, store)
        call_connections = connect_ranks("calls", info.rank, info.num_shards, store, host, join_timeout_s)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=torch.distributed.PrefixStore("pagedkv/collectives", store),
            rank=info.rank,
            world_size=info.num_shards,
            timeout=_COLLECTIVE_TIMEOUT,
        )
    except Exception as error:
        failure_detector.leave(f"rank {info.rank} has failed: {error}")
        raise
    _group = ShardGroup(info, run_seed, failure_detector, step_timeout_s, call_connections)
    logger.info("rank %d of %d has joined the others at %s:%d", info.rank, info.num_shards, host, port)
    return _group


def _refuse_mixed_devices(info: ShardInfo, store: torch.distributed.TCPStore, device_type: str) -> None:
    store.set(f"pagedkv/device/{info.rank}", device_type)
    devices = [store.get(f"pagedkv/device/{rank}").decode() for rank in range(info.num_shards)]
    if len(set(devices)) > 1:
        raise ConfigError(
            f"the shards must have devices of one kind, but ranks 0 to {info.num_shards - 1} have {', '.join(devices)}"
        )


def _agree_on_seed(info: ShardInfo, store: torch.distributed.TCPStore) -> int:
    if info.rank == 0:
        store.set("pagedkv/run_seed", str(secrets.randbits(64)))
    return int(store.get("pagedkv/run_seed"))


def _connect_store(info: ShardInfo, host: str, port: int, timeout_s: float) -> torch.distributed.TCPStore:
    try:
        return torch.distributed.TCPStore(
            host,
            port,
            info.num_shards,
            is_master=info.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:  # torch's own errors of this kind are RuntimeErrors
        if info.rank:
            raise ShardError(
                f"rank {info.rank} can't reach rank 0 at {host}:{port} within {timeout_s:g} s: did it start, and are "
                f"MASTER_ADDR and MASTER_PORT the same for all? ({error})"
            ) from error
        raise ConfigError(
            f"rank 0 can't listen on {host}:{port} for the other shards; set MASTER_PORT to a free port ({error})"
        ) from error
