"""Divides a machine between replicas of a model: threads, memory, GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.plugin.config import AUTO, Config
from pagedkv.plugin.threads import choose_threads, read_named_threads

_ONE_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def share_threads(config: Config, num_replicas: int) -> dict[str, Any]:
    """Settings by which replicas share cores and CPU quota, of which one would take all; none where a number is set."""
    if num_replicas == 1 or config.model.threads != AUTO or read_named_threads() is not None:
        return {}
    return {"model.threads": choose_threads(AUTO, num_replicas).num_threads}


def share_memory(config: Config, num_replicas: int) -> dict[str, Any]:
    """Settings by which replicas share the memory of which one would take its fraction; none where a size is given."""
    if config.cache.memory != AUTO or config.cache.num_blocks != AUTO:
        return {}
    num_devices = max(1, _count_gpus()) if _may_choose_gpu(config) else 1
    num_sharing = -(-num_replicas // num_devices)
    return {"cache.memory_fraction": config.cache.memory_fraction / num_sharing} if num_sharing > 1 else {}


def choose_gpu(config: Config, index: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the replica of this number: where there are several GPUs it sees one of them, in turn."""
    visible = [one for one in environ.get(_ONE_GPU_VARIABLE, "").split(",") if one]
    if not _may_choose_gpu(config) or (num_gpus := _count_gpus()) < 2:
        return dict(environ)
    names = visible or [str(number) for number in range(num_gpus)]
    return {**environ, _ONE_GPU_VARIABLE: names[index % len(names)]}


def _may_choose_gpu(config: Config) -> bool:
    """Not where the config names one, as cuda:1, which all replicas then share."""
    return config.model.device in (AUTO, "cuda")


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
