"""The plan beside the engine: what was planned, and what the tensors of a started engine take."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.integration.plan.capacities import contiguous_bytes_per_token
from pagedkv.integration.plan.plan import Plan, PlanRequest
from pagedkv.integration.plan.traffic import Traffic
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.registry import BACKENDS, find_plugin
from pagedkv.plugin.requests import Request, RequestId, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 0.03

REQUEST = Traffic(prompt_tokens=100, output_tokens=8)
"""Run once, to see what a request holds at its end."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity."""

    what: str
    planned: int
    found: int
    how: str
    """Where `found` comes from."""

    @property
    def difference(self) -> float:
        """Of the plan from what was found; 0.01 is 1 % too much."""
        if self.found == self.planned:
            return 0.0
        return (self.planned - self.found) / self.found if self.found else float("inf")

    @property
    def is_true(self) -> bool:
        return abs(self.difference) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All of them, and what was not compared."""

    title: str
    comparisons: Sequence[Comparison]
    remarks: Sequence[str]

    @property
    def faults(self) -> list[str]:
        return [
            f"{one.what}: {one.planned:,} planned, {one.found:,} found ({one.difference:+.1%})"
            for one in self.comparisons
            if not one.is_true
        ]

    def to_json(self) -> dict[str, Any]:
        comparisons = [
            {**asdict(one), "difference": one.difference, "is_true": one.is_true} for one in self.comparisons
        ]
        return {"title": self.title, "comparisons": comparisons, "remarks": list(self.remarks), "faults": self.faults}


def check_plan(written: Config) -> CheckResult:
    """Plans, starts the engine of the same config, runs one request, and compares.

    Raises:
        UnsupportedError: a backend of which the plan knows nothing.
        PagedKVError: as the engine at start.
    """
    if written.backend not in ("paged", "contiguous"):
        raise UnsupportedError(f"the plan knows the backends paged and contiguous, not {written.backend}")
    plan = Plan(written, PlanRequest(Traffic(1, 1)))
    device = plan.config.device
    before = count_tensor_bytes(device)
    backend = find_plugin(BACKENDS, written.backend).create(plan.config)
    try:
        loaded = count_tensor_bytes(device)
        capacity = backend.warmup(WarmupLimits())
        pool_bytes = count_tensor_bytes(device) - loaded
        comparisons = [
            Comparison("weights, bytes", plan.budget.weight_bytes, loaded - before, "tensors alive after loading"),
            *_compare_cache(plan, backend, capacity.num_blocks, capacity.max_cache_tokens, pool_bytes),
            _compare_request(plan, backend),
        ]
    finally:
        backend.close()
    return CheckResult(_title(plan, backend), comparisons, list(_remarks(plan)))


def count_tensor_bytes(device: torch.device) -> int:
    """Of all tensors alive in this process on a device, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device.type:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _compare_cache(plan: Plan, backend: Backend, num_blocks: int, num_tokens: int, pool_bytes: int) -> list[Comparison]:
    budget, config = plan.budget, plan.config
    if config.backend == "paged":
        return [
            Comparison("blocks", budget.num_blocks, num_blocks, "capacity after warm-up"),
            Comparison("tokens", int(plan.holding.num_tokens * config.cache.overcommit), num_tokens, "capacity"),
            Comparison("KV, bytes", budget.kv_bytes, pool_bytes, "tensors alive after warm-up, less before"),
        ]
    held = plan.contiguous
    return [
        Comparison("blocks (slots)", held.num_tokens, num_blocks, "capacity after warm-up"),
        Comparison("tokens", int(held.num_tokens * config.cache.overcommit), num_tokens, "capacity"),
        Comparison(
            "KV, bytes",
            held.num_tokens * contiguous_bytes_per_token(config, plan.shard),
            backend.stats().kv_bytes_total,
            "slots × bytes that a forward of one token stored",
        ),
    ]


def _compare_request(plan: Plan, backend: Backend) -> Comparison:
    """Runs one request and takes the most that it held: blocks in use, or a contiguous cache's tensors."""
    config = plan.config
    if config.backend == "paged":
        planned = REQUEST.blocks_at_end(config.cache.block_size) * plan.budget.bytes_per_block
        return Comparison("KV of a request, bytes", planned, _run_request(backend, None), "blocks in use while it ran")
    planned = min(config.max_total_tokens, plan.contiguous.num_tokens) * contiguous_bytes_per_token(config, plan.shard)
    found = _run_request(backend, config.device)
    return Comparison("KV of a request, bytes", planned, found, "tensors alive while it ran, less before")


def _run_request(backend: Backend, device: torch.device | None) -> int:
    """Bytes of tensors on `device` beside those before; as the backend's statistics have it where that is None."""
    before = count_tensor_bytes(device) if device else 0
    params = SamplingParams(max_new_tokens=REQUEST.output_tokens, ignore_eos=True)
    backend.add([Request(RequestId(0), [1] * REQUEST.prompt_tokens, params)])
    most = 0
    while backend.has_unfinished():
        backend.step()
        held = count_tensor_bytes(device) - before if device else backend.stats().kv_bytes_reserved
        most = max(most, held)
    return most


def _title(plan: Plan, backend: Backend) -> str:
    info = backend.info
    return (
        f"{plan.facts.spec.architecture}, {info.backend}, KV {info.kv_dtype.name}, weights "
        f"{str(info.dtype).removeprefix('torch.')}, {info.device.type}, kernels {info.attention_kernels}"
    )


def _remarks(plan: Plan) -> list[str]:
    remarks = []
    if plan.config.device.type == "cpu":
        remarks.append(
            "Activations, graphs and workspace are not compared: on a CPU the engine measures none and sizes no pool "
            "by them."
        )
    else:
        remarks.append("Activations, graphs and workspace are compared through the blocks that they leave.")
    if plan.config.backend == "contiguous":
        remarks.append(
            "A contiguous cache allocates as requests come: its KV bytes are room; those of the request are tensors."
        )
    return remarks


def make_table(result: CheckResult) -> Table:
    from rich.table import Table

    table = Table(title=result.title, title_justify="left")
    for column in ("what", "planned", "found", "difference", "found by"):
        table.add_column(column, justify="left" if column in ("what", "found by") else "right")
    for one in result.comparisons:
        style = "" if one.is_true else "red"
        table.add_row(one.what, f"{one.planned:,}", f"{one.found:,}", f"{one.difference:+.2%}", one.how, style=style)
    return table
