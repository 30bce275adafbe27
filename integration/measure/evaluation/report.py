"""Results of an evaluation, as JSON, table and plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.integration.measure.evaluation.accuracy import PathSums
from pagedkv.integration.measure.evaluation.texts import TextKind
from pagedkv.integration.measure.extra import require_bench_extra
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class KindResult:
    """Results of one KV dtype on one kind of text."""

    sums: PathSums
    greedy_equal: float

    def to_json(self, bytes_per_token: float) -> dict[str, Any]:
        return {
            **asdict(self.sums.total()),
            "greedy_equal": self.greedy_equal,
            "bytes_per_token": bytes_per_token,
            "paths": {
                "chunked": asdict(self.sums.chunked.means()),
                "decode": asdict(self.sums.decode.means()),
            },
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All results of an evaluation."""

    model: str
    unquantized: str
    """KV dtype of the run with which all others are compared."""
    kernels: Mapping[str, str]
    """Names of the kernels that ran each KV dtype."""
    block_size: int
    results: Mapping[str, Mapping[TextKind, KindResult]]
    recall: Mapping[str, Mapping[float, float]]
    """By KV dtype and depth."""
    recall_tokens: int
    bytes_per_token: Mapping[str, float]
    """By KV dtype, over all layers, scales and padding counted."""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "unquantized": self.unquantized,
            "kernels": dict(self.kernels),
            "block_size": self.block_size,
            "results": {
                name: {kind: result.to_json(self.bytes_per_token[name]) for kind, result in kinds.items()}
                for name, kinds in self.results.items()
            },
            "recall_tokens": self.recall_tokens,
            "recall": {
                name: {f"{depth:g}": share for depth, share in shares.items()} for name, shares in self.recall.items()
            },
        }


def make_table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"KV dtypes beside {report.unquantized}", title_justify="left")
    for column in (
        "KV dtype",
        "kernels",
        "bytes a token",
        "text",
        "tokens",
        "perplexity",
        "ratio",
        "KL",
        "top-1",
        "greedy",
    ):
        table.add_column(column, justify="left" if column in ("KV dtype", "kernels", "text") else "right")
    table.add_column("recall", justify="right")
    for name, kinds in report.results.items():
        shares = report.recall.get(name, {}).values()
        for kind, result in kinds.items():
            means = result.sums.total()
            table.add_row(
                name,
                report.kernels[name],
                f"{report.bytes_per_token[name]:,.0f}",
                kind,
                f"{means.num_tokens:,}",
                f"{means.ppl:.3f}",
                f"{100 * (means.ppl_ratio - 1):+.2f} %",
                f"{means.kl:.5f}",
                f"{100 * means.top1:.1f} %",
                f"{100 * result.greedy_equal:.0f} %",
                f"{100 * sum(shares) / len(shares):.0f} %" if shares else "–",
            )
    return table


def save_plot(report: Report, file: Path) -> None:
    """Draws lost perplexity over bytes a token, with a line for each kind of text.

    Raises:
        ConfigError: matplotlib is not installed, or can't write a file of this suffix.
    """
    require_bench_extra()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys(kind for of_dtype in report.results.values() for kind in of_dtype)
    names = sorted(report.results, key=lambda name: report.bytes_per_token[name])
    for kind in kinds:
        losses = [100 * (report.results[name][kind].sums.total().ppl_ratio - 1) for name in names]
        axes.plot([report.bytes_per_token[name] for name in names], losses, "o-", label=kind)
    for name in names:
        axes.axvline(report.bytes_per_token[name], color="0.9", zorder=0)
        axes.text(report.bytes_per_token[name], 0, f" {name}", rotation=90, fontsize=8, va="bottom", color="0.4")
    axes.set_xlabel("bytes a token")
    axes.set_ylabel(f"perplexity above {report.unquantized} (%)")
    axes.legend()
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"can't write the plot {file}: {error}") from error
