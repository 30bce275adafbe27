"""Draws the number of requests at once over their length."""

from __future__ import annotations

from pathlib import Path

from pagedkv.integration.measure.extra import require_bench_extra
from pagedkv.integration.measure.plan.memory_plan import MemoryPlan
from pagedkv.integration.measure.plan.traffic import Traffic
from pagedkv.plugin.errors import ConfigError

MIN_TOKENS = 32


def curve(num_blocks: int, block_size: int, lengths: list[int]) -> list[int]:
    """Number of requests at once for each length (prompt and output together), all at their ends."""
    return [num_blocks // Traffic(length - 1, 1).blocks_at_end(block_size) for length in lengths]


def lengths_up_to(max_total_tokens: int) -> list[int]:
    """Lengths that double, and the longest one."""
    lengths = [MIN_TOKENS]
    while lengths[-1] * 2 < max_total_tokens:
        lengths.append(lengths[-1] * 2)
    return [*lengths, max_total_tokens]


def save_plot(plan: MemoryPlan, file: Path) -> None:
    """Draws a line for each size of KV dtype, and one for a contiguous cache, which reserves the longest length.

    Raises:
        ConfigError: matplotlib is not installed, or can't write a file of this suffix.
    """
    require_bench_extra()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = lengths_up_to(plan.config.max_total_tokens)
    by_size: dict[float, list[str]] = {}
    for change in plan.changes:
        by_size.setdefault(change.bytes_per_token, []).append(change.kv_dtype)
    num_blocks = {change.bytes_per_token: change.num_blocks for change in plan.changes}
    for size, names in by_size.items():
        counts = curve(num_blocks[size], plan.config.cache.block_size, lengths)
        axes.plot(lengths, counts, "o-", markersize=3, label=f"paged, {', '.join(names)}")
    rows = plan.contiguous.longest_requests
    axes.plot(lengths, [rows] * len(lengths), "k--", label="contiguous")
    axes.axhline(plan.config.scheduler.max_num_sequences, color="0.7", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a request, prompt and output")
    axes.set_ylabel("requests at once (grey: scheduler.max_num_sequences)")
    axes.legend(fontsize=7)
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"can't write the plot {file}: {error}") from error
