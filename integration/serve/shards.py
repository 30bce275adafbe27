"""Sets a server process up as one shard of a model: selects its GPU and joins the process group."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch

from pagedkv.plugin.config import AUTO, Config
from pagedkv.plugin.cores import read_cpu_share, split_cores
from pagedkv.plugin.distributed import ShardGroup, ShardInfo, join_shards
from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

EXIT_SHARD_FAILED = 3
"""Exit code if this or another shard failed, so that the model can't be served any more."""

DEFAULT_HOST = "localhost"
DEFAULT_PORT = 29500
"""The default port of torch's own launcher."""


@contextmanager
def joined_shards(
    config: Config, shard: ShardInfo, num_threads: int, environ: MutableMapping[str, str] = os.environ
) -> Iterator[ShardGroup | None]:
    """Context manager in which this process is one of the shards of a model. Does nothing for a single process.

    Reads MASTER_ADDR and MASTER_PORT. When another shard fails or ends, this process ends with EXIT_SHARD_FAILED.

    Args:
        num_threads: of this shard, for which it takes cores of its own.

    Raises:
        ConfigError: an address or a device can't be used.
        ShardError: other shards did not join in time.
    """
    if shard.num_shards == 1:
        yield None
        return
    refuse_tcp(config)
    device_type = claim_device(config.model.device, shard.rank, environ)
    if device_type == "cpu":
        take_own_cores(shard, num_threads)
    group = join_shards(
        shard,
        environ.get("MASTER_ADDR") or DEFAULT_HOST,
        _read_port(environ),
        device_type=device_type,
        on_failure=end_process,
        step_timeout_s=config.server.stuck_step_timeout_s,
    )
    try:
        yield group
    except Exception as error:
        group.leave(failure=f"{type(error).__name__}: {error}")
        raise
    finally:
        group.leave()


def claim_device(device: str, rank: int, environ: MutableMapping[str, str]) -> str:
    """Makes the GPU of this process's rank the only visible one, or hides all GPUs if the config says CPU.

    So every library uses the right GPU by default, on every thread. Must run before CUDA is first used.

    Returns:
        "cuda" or "cpu".

    Raises:
        ConfigError: the config names one GPU for all shards, or there is no GPU for this rank.
    """
    if device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    if device not in (AUTO, "cuda"):
        raise ConfigError(
            f'model.device is {device!r}, but each shard takes a device of its own; set it to "auto", "cuda" or "cpu"'
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":
        own = [str(rank)] if visible is None else visible.split(",")[rank : rank + 1]
        if not own:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES is {visible}: there is no GPU for rank {rank}; use fewer shards")
        environ["CUDA_VISIBLE_DEVICES"] = own[0]
    environ["LOCAL_RANK"] = "0"  # transformers takes the GPU of this number, among the visible ones
    return "cuda" if torch.cuda.is_available() else "cpu"


def take_own_cores(shard: ShardInfo, num_threads: int) -> None:
    """Restricts this thread, and those that it starts, to this shard's part of the cores; all shards run here.

    Does nothing if the part is too small for the threads, as where a number was set or there are more shards than
    cores.
    """
    cores = read_cpu_share().cores
    own = split_cores(cores, shard.num_shards)[shard.rank]
    if own and num_threads <= len(cores) // shard.num_shards and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, own)
        logger.info("cores: %s", ", ".join(map(str, own)))


def end_process(message: str) -> None:
    """Ends the process at once. Does not wait for threads: they may be blocked on a shard that has ended."""
    logger.critical("this shard ends: %s", message)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(EXIT_SHARD_FAILED)


def refuse_tcp(config: Config) -> None:
    """Raises ConfigError if the config has TCP addresses, which several shards can't share."""
    if config.server.listen or not config.server.uds_path:
        raise ConfigError(
            "several shards listen on Unix sockets, one each: set server.uds_path and leave server.listen out"
        )


def _read_port(environ: MutableMapping[str, str]) -> int:
    text = environ.get("MASTER_PORT") or str(DEFAULT_PORT)
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT must be a port number (found {text!r})")
    return int(text)
