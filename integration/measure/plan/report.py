"""Formats a plan as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagedkv.integration.measure.plan.memory_plan import MemoryPlan
from pagedkv.plugin.memory import format_bytes

if TYPE_CHECKING:
    from rich.table import Table


_TEXT = ("formula", "remark")
"""Columns without numbers."""


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Converts a plan to JSON. Sizes are in bytes of one shard."""
    budget, config, traffic = plan.budget, plan.config, plan.request.traffic
    return {
        "architecture": plan.facts.spec.architecture,
        "refusal": plan.facts.refusal,
        "notes": list(notes(plan)),
        "device": config.device.type,
        "num_devices": plan.request.num_devices,
        "dtype": str(config.dtype).removeprefix("torch."),
        "kv_dtype": config.cache.kv_dtype.name,
        "block_size": config.cache.block_size,
        "num_parameters": plan.facts.spec.num_parameters,
        "layer_kinds": [asdict(kind) for kind in plan.layer_kinds],
        "kv_bytes_per_token": plan.bytes_per_token,
        "kv_bytes_per_block": budget.bytes_per_block,
        "device_memory_bytes": budget.memory.total_bytes,
        "weight_bytes": budget.weight_bytes,
        "activation_bytes": budget.activation_bytes,
        "graph_bytes": budget.graph_bytes,
        "workspace_bytes": budget.workspace_bytes,
        "kv_bytes": budget.kv_bytes,
        "formula": budget.formula,
        "num_blocks": budget.num_blocks,
        "prompt_tokens": traffic.prompt_tokens,
        "output_tokens": traffic.output_tokens,
        "max_total_tokens": config.max_total_tokens,
        "max_num_sequences": config.scheduler.max_num_sequences,
        "paged": asdict(plan.holding),
        "contiguous": asdict(plan.contiguous),
        "kv_dtypes": [asdict(change) for change in plan.changes],
        "device_options": [{**asdict(option), "num_devices": option.num_devices} for option in _options(plan)],
    }


def notes(plan: MemoryPlan) -> Iterator[str]:
    """Yields remarks that a reader of the numbers needs."""
    facts, config, budget = plan.facts, plan.config, plan.budget
    if facts.refusal:
        yield f"pagedkv can't serve this model: {facts.refusal}. The bytes below are what it would take."
    if facts.doubt:
        yield f"{facts.doubt}."
    if facts.latent is not None:
        yield "Latent attention is kept as expanded keys and values of every head; the latent would be much smaller."
    if any(kind.sliding_window for kind in plan.layer_kinds):
        yield "Layers with a sliding window keep all tokens too: a block holds its tokens' KV in every layer."
    if facts.uncounted:
        yield f"Not counted: the state of layers of the types {facts.uncounted}."
    if facts.weight_bits:
        yield f"Quantized checkpoint: projections count at {facts.weight_bits} bits, without scales; never run by us."
    if budget.memory.is_host:
        yield "On a CPU activations come out of the half of the memory that the pool leaves."
    if not budget.memory.is_host:
        yield "The contiguous cache is given the same activations; a prefill of whole prompts takes more."
    if not budget.memory.is_host and plan.step.is_estimate:
        yield "Activations are an estimate: this model's step can't be run without weights."
    if plan.request.num_devices > 1 and plan.shard.layers == facts.spec.layers:
        yield "transformers' plan does not split this model's attention: every shard keeps all KV heads."
    if not plan.is_device_here:
        yield "This machine has no GPU: whether the attention kernels serve this model is seen at start."
    elif refusal := plan.refusal_of(config.cache.kv_dtype):
        yield f"The attention kernels can't serve this here: {refusal}."
    if budget.is_capped:
        yield (
            f"Memory would hold more blocks: {config.scheduler.max_num_sequences} sequences "
            f"(scheduler.max_num_sequences) of {config.max_total_tokens} tokens take no more."
        )


def make_tables(plan: MemoryPlan) -> list[Table]:
    tables = [_layers(plan), _memory(plan), _requests(plan), _kv_dtypes(plan)]
    return [*tables, _devices(plan)] if plan.request.concurrency else tables


def _options(plan: MemoryPlan) -> Any:
    return plan.device_options if plan.request.concurrency else []


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column not in _TEXT else "left")
    return table


def _layers(plan: MemoryPlan) -> Table:
    shards = f", one of {plan.request.num_devices} shards" if plan.request.num_devices > 1 else ""
    table = _table(f"KV of a token in {plan.config.cache.kv_dtype.name}{shards}", "layers", "a token", "formula")
    for kind in plan.layer_kinds:
        table.add_row(f"{kind.num_layers} × {kind.name}", format_bytes(kind.bytes_per_token), kind.formula)
        if kind.latent_bytes_per_token is not None:
            latent = plan.facts.latent
            assert latent is not None
            table.add_row(
                "  as a latent (not served)",
                format_bytes(kind.latent_bytes_per_token),
                f"{kind.num_layers} layers × ({latent.rank} + {latent.rope_dim}) elements",
            )
    table.add_row("all", format_bytes(plan.bytes_per_token), f"{plan.bytes_per_token:,.0f} B")
    return table


def _memory(plan: MemoryPlan) -> Table:
    budget, config = plan.budget, plan.config
    where = "this machine" if plan.request.device_memory_bytes is None else "a device"
    table = _table(f"Memory of {where}", "what", "bytes", "remark")
    num_tokens = config.scheduler.max_step_tokens
    rows = [
        ("total", budget.memory.total_bytes, config.device.type),
        ("weights", budget.weight_bytes, str(config.dtype).removeprefix("torch.")),
        ("activations", budget.activation_bytes, f"largest step: {num_tokens} tokens (scheduler.max_step_tokens)"),
        ("graphs", budget.graph_bytes, f"{len(config.graph_batch_sizes)} batch sizes"),
        ("workspace", budget.workspace_bytes, "an allowance, not measured" if budget.workspace_bytes else ""),
        ("KV", budget.kv_bytes, f"= {budget.formula}, in whole blocks"),
    ]
    for what, num_bytes, remark in rows:
        table.add_row(what, format_bytes(num_bytes), remark)
    block = f"{budget.num_blocks:,} blocks of {config.cache.block_size} tokens, {format_bytes(budget.bytes_per_block)}"
    table.add_row("", "", f"{block} each")
    return table


def _requests(plan: MemoryPlan) -> Table:
    traffic, config = plan.request.traffic, plan.config
    lengths = f"{traffic.prompt_tokens} prompt + {traffic.output_tokens} output tokens"
    table = _table(
        f"Requests at once that memory holds, of {lengths} (scheduler.max_num_sequences runs "
        f"{config.scheduler.max_num_sequences})",
        "cache",
        "tokens",
        "mean",
        "worst (all at their ends)",
        f"of {config.max_total_tokens} tokens",
    )
    for name, held in (("paged", plan.holding), ("contiguous", plan.contiguous)):
        numbers = (held.num_tokens, held.mean_requests, held.worst_requests, held.longest_requests)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    return table


def _kv_dtypes(plan: MemoryPlan) -> Table:
    table = _table(
        "What each KV dtype would change", "KV dtype", "a token", "blocks", "tokens", "mean", "worst", "remark"
    )
    for change in plan.changes:
        table.add_row(
            change.kv_dtype,
            format_bytes(change.bytes_per_token),
            f"{change.num_blocks:,}",
            f"{change.holding.num_tokens:,}",
            f"{change.holding.mean_requests:,}",
            f"{change.holding.worst_requests:,}",
            "not here" if change.refusal else "",
        )
    return table


def _devices(plan: MemoryPlan) -> Table:
    table = _table(
        f"Devices for {plan.request.concurrency} requests at once, all at their ends",
        "devices",
        "replicas",
        "shards of each",
        "requests a replica",
    )
    for option in plan.device_options:
        numbers = (option.num_devices, option.num_replicas, option.num_shards, option.requests_per_replica)
        table.add_row(*(f"{number:,}" for number in numbers))
    return table
