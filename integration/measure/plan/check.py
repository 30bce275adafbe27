"""Compares a plan with the engine: planned bytes, and bytes of the tensors of a started engine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.integration.measure.plan.capacities import contiguous_bytes_per_token
from pagedkv.integration.measure.plan.memory_plan import MemoryPlan, PlanRequest
from pagedkv.integration.measure.plan.traffic import Traffic
from pagedkv.plugin.assemble import use_threads
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.memory import DeviceMemory, read_device_memory
from pagedkv.plugin.registry import BACKENDS, create_plugin
from pagedkv.plugin.requests import Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import MemoryFraction
from pagedkv.plugin.threads import choose_threads

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 0.03

REQUEST = Traffic(prompt_tokens=100, output_tokens=8)
"""A request that is run once, to measure what it holds at its end."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity, planned and found."""

    what: str
    planned: int
    found: int
    how: str
    """Where `found` comes from."""

    @property
    def difference(self) -> float:
        """Relative difference of the plan from what was found; 0.01 means the plan is 1 % too high."""
        if self.found == self.planned:
            return 0.0
        return (self.planned - self.found) / self.found if self.found else float("inf")

    @property
    def is_true(self) -> bool:
        return abs(self.difference) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All comparisons, and what was not compared."""

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
        UnsupportedError: the plan does not support the backend.
        PagedKVError: as at the engine's start.
    """
    if written.backend not in ("paged", "contiguous"):
        raise UnsupportedError(f"the plan knows the backends paged and contiguous, not {written.backend}")
    config = MemoryPlan(written, PlanRequest(Traffic(1, 1))).config
    use_threads(choose_threads(written.model.threads))
    before = count_tensor_bytes(config.device)
    backend = create_plugin(BACKENDS, written.backend, config.plugins, config)
    try:
        loaded = count_tensor_bytes(config.device)
        # Read as late as the engine does: other programs allocate and free memory while a model is loaded.
        memory = _memory_before(config.device, loaded - before)
        capacity = backend.warmup(WarmupLimits())
        plan = MemoryPlan(written, PlanRequest(Traffic(1, 1), memory=memory))
        pool_bytes = count_tensor_bytes(config.device) - loaded
        comparisons = [
            Comparison("weights, bytes", plan.budget.weight_bytes, loaded - before, "tensors alive after loading"),
            *_compare_cache(plan, backend, capacity.num_blocks, capacity.max_cache_tokens, pool_bytes),
            _compare_request(plan, backend),
        ]
    finally:
        backend.close()
    return CheckResult(_title(plan, backend), comparisons, list(_remarks(plan)))


def _memory_before(device: torch.device, loaded_bytes: int) -> DeviceMemory:
    """Memory of a device before `loaded_bytes` were loaded onto it."""
    now = read_device_memory(device)
    return replace(now, free_bytes=now.free_bytes + loaded_bytes)


def count_tensor_bytes(device: torch.device) -> int:
    """Bytes of all live tensors of this process on a device, each storage counted once.

    Memory of a storage before its first and after its last tensor is not counted. Kernels allocate it to begin at a
    large page; it is address space that is never used.
    """
    gc.collect()
    spans: dict[int, tuple[int, int]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device.type and thing.numel():
            key, (start, end) = thing.untyped_storage()._cdata, _span(thing)
            first, last = spans.get(key, (start, end))
            spans[key] = min(first, start), max(last, end)
    return sum(end - start for start, end in spans.values())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a strided tensor in its storage."""
    start = int(tensor.storage_offset())
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, int(end) * tensor.itemsize


def _compare_cache(
    plan: MemoryPlan, backend: Backend, num_blocks: int, num_tokens: int, pool_bytes: int
) -> list[Comparison]:
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


def _compare_request(plan: MemoryPlan, backend: Backend) -> Comparison:
    """Runs one request and measures the most that it held: blocks in use, or a contiguous cache's tensors."""
    config = plan.config
    if config.backend == "paged":
        planned = REQUEST.blocks_at_end(config.cache.block_size) * plan.budget.bytes_per_block
        return Comparison("KV of a request, bytes", planned, _run_request(backend, None), "blocks in use while it ran")
    planned = min(config.max_total_tokens, plan.contiguous.num_tokens) * contiguous_bytes_per_token(config, plan.shard)
    found = _run_request(backend, config.device)
    return Comparison("KV of a request, bytes", planned, found, "tensors alive after its first step, less before")


def _run_request(backend: Backend, device: torch.device | None) -> int:
    """Runs a request to its end.

    Returns:
        Bytes of tensors on `device` that its first step left; the most that the backend's statistics had in use where
        that is None.
    """
    before = count_tensor_bytes(device) if device else 0
    params = SamplingParams(max_new_tokens=REQUEST.output_tokens, ignore_eos=True)
    backend.add([Request(RequestId(0), [1] * REQUEST.prompt_tokens, params)])
    backend.step()
    most = count_tensor_bytes(device) - before if device else 0
    while backend.has_unfinished():
        if not device:
            most = max(most, backend.stats().kv_bytes_reserved)
        backend.step()
    return most


def _title(plan: MemoryPlan, backend: Backend) -> str:
    info = backend.info
    return (
        f"{plan.facts.spec.architecture}, {info.backend}, KV {info.kv_dtype.name}, weights "
        f"{str(info.dtype).removeprefix('torch.')}, {info.device.type}, kernels {info.attention_kernels}"
    )


def _remarks(plan: MemoryPlan) -> list[str]:
    remarks = []
    if plan.config.device.type == "cpu":
        remarks.append(
            "Activations, graphs and workspace are not compared: on a CPU the engine measures none and sizes no pool "
            "by them."
        )
        if isinstance(plan.config.cache.budget, MemoryFraction):
            remarks.append("Free memory moves with other programs: with a cache.memory of your own blocks are exact.")
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
