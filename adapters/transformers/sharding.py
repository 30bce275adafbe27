"""Splits a model over the shards of a group, by transformers' own tensor-parallel plan (Shoeybi et al., "Megatron-LM",
2019: projections into the heads by columns, the one out of them by rows).

Query heads are divided evenly, and so are KV heads. If there are fewer KV heads than shards, each shard keeps the one
that its query heads read, and several shards keep the same one.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec

logger = logging.getLogger(__name__)

_BY_HEADS = "colwise"
_WHOLE = "replicate"
_KV_PROJECTIONS = ("k_proj", "v_proj")


def plan_split(spec: ModelSpec, modules: torch.nn.Module, num_shards: int) -> dict[str, Any]:
    """Returns the arguments with which `from_pretrained` splits a model.

    Args:
        spec: of the whole model.
        modules: of the whole model; they need no memory.

    Returns:
        Keyword arguments.

    Raises:
        UnsupportedError: transformers has no plan for the architecture, or heads can't be divided; the message says
            over how many shards it can be split.
    """
    plan = _plan_of(modules)
    if not plan:
        raise UnsupportedError(
            f"{spec.architecture} has no tensor-parallel plan in transformers; serve it with one shard"
        )
    _refuse_uneven_heads(spec, num_shards)
    kept_whole = dict.fromkeys(_find_kv_projections(plan), _WHOLE) if has_shared_heads(spec, num_shards) else {}
    if "tp_plan" in DistributedConfig.__dataclass_fields__:
        return {"distributed_config": DistributedConfig(tp_size=num_shards, tp_plan=kept_whole or "auto")}
    if kept_whole:
        raise UnsupportedError(
            f"{spec.architecture} has fewer KV heads than {num_shards} shards, which this version of transformers "
            "can't split; update it"
        )
    return {"tp_plan": "auto"}


def has_shared_heads(spec: ModelSpec, num_shards: int) -> bool:
    """Whether there are fewer KV heads than shards, so that several shards keep the same one."""
    return spec.layers[0].num_kv_heads < num_shards


def describe_shard(spec: ModelSpec, modules: torch.nn.Module, num_shards: int) -> ModelSpec:
    """Returns one shard's part of a model by transformers' plan. Attention stays whole if the plan does not split it.

    Args:
        spec: of the whole model.
        modules: of the whole model; they need no memory.

    Raises:
        UnsupportedError: as `plan_split` does.
    """
    if num_shards == 1:
        return spec
    plan_split(spec, modules, num_shards)
    if not _find_kv_projections(_plan_of(modules)):
        return spec
    shares = [_share(layer, num_shards) for layer in spec.layers]
    return replace(
        spec,
        layers=tuple(
            replace(layer, num_heads=num_heads, num_kv_heads=num_kv_heads)
            for layer, (num_heads, num_kv_heads) in zip(spec.layers, shares, strict=True)
        ),
    )


def count_shard_parameters(modules: torch.nn.Module, num_shards: int, num_kv_heads: int) -> dict[str, int]:
    """Counts the elements of each parameter on the first shard, which has the most if they don't divide evenly.

    Args:
        modules: of the whole model; they need no memory.
        num_kv_heads: of the whole model. If there are fewer than shards, several shards keep the same head.
    """
    plan = _plan_of(modules)
    counts = {}
    for name, parameter in modules.named_parameters():
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        module = general.rpartition(".")[0]
        style = plan.get(general) or plan.get(module) or _WHOLE
        parts = min(num_shards, num_kv_heads) if module.rpartition(".")[2] in _KV_PROJECTIONS else num_shards
        dim = _split_dim(style, parameter.dim())
        counts[name] = parameter.numel()
        if dim is not None:
            size = parameter.shape[dim]
            counts[name] = parameter.numel() // size * -(-size // parts)
    return counts


def _split_dim(style: str, num_dims: int) -> int | None:
    """Returns the dim that a plan splits, of weights [out, in], experts [experts, out, in], embeddings [rows, cols]."""
    if style.startswith("embedding"):
        return 0 if "rowwise" in style else 1
    if "colwise" in style:
        return max(0, num_dims - 2)
    return num_dims - 1 if "rowwise" in style and num_dims > 1 else None


def _plan_of(modules: torch.nn.Module) -> dict[str, str]:
    return dict(getattr(modules, "tp_plan", None) or {})


def keep_shared_head(model: torch.nn.Module, spec: ModelSpec, shard: ShardInfo) -> None:
    """Reduces key and value projections, which were loaded whole, to the head that this shard's query heads read."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in _KV_PROJECTIONS or not isinstance(module, torch.nn.Linear):
            continue
        num_kv_heads = spec.layers[0].num_kv_heads
        head_dim = module.out_features // num_kv_heads
        first = shard.rank * num_kv_heads // shard.num_shards * head_dim
        for parameter in module.parameters():
            parameter.data = parameter.data[first : first + head_dim].clone()
        module.out_features = head_dim


def check_split(whole: ModelSpec, part: ModelSpec, num_shards: int) -> None:
    """Compares a shard's layers, as they called the attention, with the whole model's.

    A plan may leave attention whole on every shard (fused projections of Phi-3). This works, but every shard needs the
    memory of a whole cache; the log says so.

    Raises:
        UnsupportedError: the heads of a layer are neither this shard's part nor the whole.
    """
    for index, (whole_layer, layer) in enumerate(zip(whole.layers, part.layers, strict=True)):
        if _heads(layer) not in (_heads(whole_layer), _share(whole_layer, num_shards)):
            raise UnsupportedError(
                f"{whole.architecture} can't be split by transformers' tensor-parallel plan: layer {index} has "
                f"{_heads(layer)} query and KV heads on a shard, not {_share(whole_layer, num_shards)}; serve it with "
                "one shard"
            )
    if _heads(part.layers[0]) == _heads(whole.layers[0]):
        logger.warning(
            "transformers' tensor-parallel plan does not split the attention of %s: every shard keeps all KV heads",
            whole.architecture,
        )


def _heads(layer: AttentionSpec) -> tuple[int, int]:
    return layer.num_heads, layer.num_kv_heads


def _share(layer: AttentionSpec, num_shards: int) -> tuple[int, int]:
    return layer.num_heads // num_shards, max(1, layer.num_kv_heads // num_shards)


def _find_kv_projections(plan: dict[str, str]) -> list[str]:
    return [name for name, style in plan.items() if name.rpartition(".")[2] in _KV_PROJECTIONS and style == _BY_HEADS]


def _refuse_uneven_heads(spec: ModelSpec, num_shards: int) -> None:
    num_heads, num_kv_heads = _heads(spec.layers[0])
    if _can_split(num_heads, num_kv_heads, num_shards):
        return
    possible = [str(n) for n in range(1, num_heads + 1) if _can_split(num_heads, num_kv_heads, n)]
    raise UnsupportedError(
        f"{spec.architecture} with {num_heads} query heads and {num_kv_heads} KV heads can't be split over "
        f"{num_shards} shards; the numbers that divide both evenly are {', '.join(possible)}"
    )


def _can_split(num_heads: int, num_kv_heads: int, num_shards: int) -> bool:
    has_even_kv_heads = num_kv_heads % num_shards == 0 or num_shards % num_kv_heads == 0
    return num_heads % num_shards == 0 and has_even_kv_heads
