"""`pagedkv plugins`: lists installed plugins, whether each works on this machine, and what was measured on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from pagedkv.integration.cli.options import AsJson

if TYPE_CHECKING:
    from pagedkv.plugin.registry import Group


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One entry point and the result of loading it."""

    group: str
    name: str
    distribution: str
    loads: bool
    problem: str
    """Why it does not load or does not work on this machine; empty if it works."""


def plugins(as_json: AsJson = False) -> None:
    """List the plugins of every group, whether each loads here and why not, and what was measured on this machine."""
    found = list_plugins()
    if as_json:
        print(json.dumps([asdict(status) for status in found]))
    else:
        _print_table(found)
        _print_measured()


def list_plugins() -> list[PluginStatus]:
    """Loads every plugin. Sorted by group and name."""
    from pagedkv.plugin.registry import GROUPS, list_entry_points

    return [_try_plugin(group, point) for group in GROUPS for point in list_entry_points(group)]


def _try_plugin(group: Group[Any], point: EntryPoint) -> PluginStatus:
    from pagedkv.plugin.errors import PluginError
    from pagedkv.plugin.registry import KERNELS, load_entry_point

    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else ""
    try:
        plugin = load_entry_point(group, point)
    except PluginError as error:
        return PluginStatus(group.name, point.name, distribution, False, str(error))
    problem = _why_not_here(plugin) if group is KERNELS else ""
    return PluginStatus(group.name, point.name, distribution, True, problem)


def _why_not_here(kernels: Any) -> str:
    """Why attention kernels can't run a common layer on this machine's device; empty if they can."""
    import torch

    from pagedkv.plugin.errors import PagedKVError
    from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
    from pagedkv.plugin.model_spec import AttentionSpec

    dtype = torch.bfloat16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    try:
        made = kernels.create(device)
        reasons = made.unsupported_reasons(layer, layer.cache_spec(16, KV_DTYPE_OF_TORCH[dtype]), dtype)
    except PagedKVError as error:
        return str(error)
    return "; ".join(reasons)


def _print_table(found: list[PluginStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("group", "name", "distribution", "here")
    for status in found:
        table.add_row(status.group, status.name, status.distribution, _verdict(status))
    Console().print(table)


def _print_measured() -> None:
    """What `auto` measured on this machine when models were loaded."""
    from pagedkv.kernels.cpu.measured_choice import kept_tables

    if tables := kept_tables():
        print("\nMeasured on this machine (* is the fastest):")
    for table in tables:
        print(table)


def _verdict(status: PluginStatus) -> str:
    if not status.loads:
        return f"[red]does not load:[/red] {status.problem}"
    return f"[yellow]not here:[/yellow] {status.problem}" if status.problem else "[green]ok[/green]"
