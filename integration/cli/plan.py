"""`pagedkv plan`: computes from a model's config.json how many requests fit into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, make_console, parse_settings
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.integration.measure.plan.memory_plan import PlanRequest

EXIT_DIFFERS = 1


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory of a model, or a config.json; no weights needed.", show_default=False),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of one GPU, as 80GiB; without, this machine's GPU or memory.")
    ] = None,
    num_devices: Annotated[int, typer.Option(min=1, help="Devices over which one model is split.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a request.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of a request.")] = 256,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Say how many devices hold so many requests at once.", show_default=False)
    ] = 0,
    backend: Annotated[str | None, typer.Option(help="For --check: paged or contiguous.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="KV dtype; auto is the model's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, float16, bfloat16; or auto.")] = None,
    workspace: Annotated[
        str | None, typer.Option(help="Memory beside all tensors, as CUDA's own; 1GiB on a GPU, nothing on a CPU.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of one shard, as 13GiB, where a config.json does not tell.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw concurrency over length into this file.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Start the engine and compare; exit with 1 beyond 3 %. MODEL or the demo's.")
    ] = False,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what a model's KV cache takes and how many requests a device holds, by the engine's own arithmetic."""
    from pagedkv.plugin.memory import parse_bytes

    flags = {"backend": backend, "cache.kv_dtype": kv_dtype, "model.dtype": dtype}
    overrides = parse_settings(settings) | {key: value for key, value in flags.items() if value is not None}

    def size(text: str | None, option: str) -> int | None:
        return None if text is None else parse_bytes(text, option)

    if check:
        if device_memory or num_devices > 1 or concurrency or plot:
            raise ConfigError("--check compares with the engine on this machine: leave out devices, concurrency, plot")
        _check(model, config, overrides, as_json)
        return
    if model is None:
        raise ConfigError("give a MODEL: a directory with a config.json, or the file")

    from pagedkv.integration.measure.plan.memory_plan import PlanRequest
    from pagedkv.integration.measure.plan.traffic import Traffic

    request = PlanRequest(
        Traffic(prompt_tokens, output_tokens),
        device_memory_bytes=size(device_memory, "--device-memory"),
        num_devices=num_devices,
        workspace_bytes=size(workspace, "--workspace"),
        weight_bytes=size(weights, "--weights"),
        concurrency=concurrency,
    )
    _plan(model, config, overrides, request, plot, as_json)


def _plan(
    model: str, config: Path | None, overrides: dict[str, Any], request: PlanRequest, plot: Path | None, as_json: bool
) -> None:
    from pagedkv.integration.measure.extra import require_bench_extra
    from pagedkv.integration.measure.plan.memory_plan import MemoryPlan
    from pagedkv.integration.measure.plan.model_facts import config_directory
    from pagedkv.integration.measure.plan.plot import save_plot
    from pagedkv.integration.measure.plan.report import make_tables, notes, to_json
    from pagedkv.plugin.config import load_config

    if plot:
        require_bench_extra()
    with config_directory(model) as directory:
        made = MemoryPlan(load_config(config, {**overrides, "model.path": directory}), request)
        if as_json:
            print(json.dumps(to_json(made)))
        else:
            console = make_console()
            console.print(f"{made.facts.spec.architecture}: {model}", highlight=False)
            for note in notes(made):
                console.print(f"• {note}", highlight=False, markup=False)
            for table in make_tables(made):
                console.print(table)
        if plot:
            save_plot(made, plot)


def _check(model: str | None, config: Path | None, overrides: dict[str, Any], as_json: bool) -> None:
    from pagedkv.integration.demo_model import ensure_demo_model
    from pagedkv.integration.measure.plan.check import check_plan, make_table
    from pagedkv.plugin.config import load_config

    path = model or str(ensure_demo_model())
    result = check_plan(load_config(config, {**overrides, "model.path": path}))
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        console = make_console()
        console.print(make_table(result))
        for remark in result.remarks:
            console.print(f"• {remark}", highlight=False, markup=False)
    if faults := result.faults:
        raise typer.Exit(_explain(faults))


def _explain(faults: list[str]) -> int:
    import sys

    print(f"pagedkv: the plan is not true: {'; '.join(faults)}", file=sys.stderr)
    return EXIT_DIFFERS
