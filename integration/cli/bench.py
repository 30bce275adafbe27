"""`pagedkv bench`: compares our backends with each other and with other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from pagedkv.integration.cli.options import ConfigFile, Settings, make_console, parse_settings
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.integration.measure.benchmark.report import Report
    from pagedkv.integration.measure.benchmark.workloads import Arrivals

STDOUT = "-"


class BenchCommand(typer.core.TyperCommand):
    """Allows `--json` without a value, which Typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        followers = [*args, "--"][1:]
        filled = [
            part
            for argument, follower in zip(args, followers, strict=True)
            for part in ((argument, STDOUT) if argument == "--json" and follower.startswith("-") else (argument,))
        ]
        return super().parse_args(ctx, filled)


def bench(
    model: Annotated[
        Path | None, typer.Argument(help="Directory of the model; the demo model if left out.", show_default=False)
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="short, long, mixed, prefix, ctx, stream, capacity, or all; several with commas between. "
            "By default short,mixed,prefix."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend of ours or of a plugin; none for peers alone. By default paged,contiguous."),
    ] = None,
    through: Annotated[
        list[str] | None,
        typer.Option(
            help="How backends are reached: process (the default), or a server by its protocol, tgi or smg; or several."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE",
            help="Run each backend once more with another value of the config, as off:model.decoder=off; several with "
            "spaces between. May be given again.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PYTHON]",
            help="Another engine and an interpreter that has it: vllm=…, vllm-one-process=…, openvino=…, "
            "llama-cpp=…; transformers runs with this one. NAME=COMMAND is a runner of your own. May be given again.",
        ),
    ] = None,
    peer_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="The model that a peer reads, where it is another file (GGUF)."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; engines take turns within each.")] = 3,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Requests a second, as a Poisson process; else all come at once.")
    ] = None,
    bursts: Annotated[int, typer.Option(min=0, help="With --rate: requests come in bursts of so many.")] = 0,
    kv_memory: Annotated[str, typer.Option(help="KV budget of every engine.")] = "4GiB",
    seed: Annotated[int, typer.Option(help="Of token ids, lengths and arrivals.")] = 0,
    scale: Annotated[float, typer.Option(min=1e-3, help="Makes all prompts and answers so many times as long.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Longest time for an engine's start, and for a repetition, in s.")] = (
        1800.0
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw the seconds into this file (png, svg, pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with tables and picture.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables in Markdown.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps what engines say.")] = (None),
    journal: Annotated[
        Path | None,
        typer.Option(help="Remember each repetition in this file: a run that was interrupted goes on there."),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="[FILE]", help="Write all figures as JSON; without FILE, print it."),
    ] = None,
) -> None:
    """Measure backends, and other engines, on the same token ids in one run; all make exactly the tokens asked for."""
    from pagedkv.integration.measure.extra import require_bench_extra

    require_bench_extra()
    from pagedkv.integration.demo_model import ensure_demo_model
    from pagedkv.integration.measure.benchmark.engines import split_names
    from pagedkv.integration.measure.benchmark.experiment import BenchmarkOptions, plan_experiment
    from pagedkv.integration.measure.benchmark.run import run_benchmark

    _require_places([plot, html, markdown, journal, None if json_file in (None, STDOUT) else Path(str(json_file))])
    options = BenchmarkOptions(
        model=model or ensure_demo_model(),
        workloads=split_names(workload) or ["short", "mixed", "prefix"],
        backends=[] if backend == ["none"] else split_names(backend) or ["paged", "contiguous"],
        transports=split_names(through) or ["process"],
        variants=_parse_variants(variant),
        peers=peer or [],
        peer_models=_parse_pairs("--peer-model", peer_model),
        config_file=config,
        overrides=parse_settings(settings),
        kv_memory=kv_memory,
        arrivals=_make_arrivals(rate, bursts),
        num_repetitions=repeat,
        seed=seed,
        scale=scale,
        timeout_s=timeout,
        logs=logs,
    )
    report = run_benchmark(options, plan_experiment(options), journal)
    _write(report, plot, html, markdown, json_file)


def _write(report: Report, plot: Path | None, html: Path | None, markdown: Path | None, json_file: str | None) -> None:
    from pagedkv.integration.measure.benchmark.html_report import to_html
    from pagedkv.integration.measure.benchmark.markdown import to_markdown
    from pagedkv.integration.measure.benchmark.plot import save_plot

    text = json.dumps(report.to_json(), indent=1)
    if json_file == STDOUT:
        print(text)
    else:
        _print_table(report)
    if json_file and json_file != STDOUT:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    if markdown:
        markdown.write_text(to_markdown(report), encoding="utf-8")
    if html:
        html.write_text(to_html(report), encoding="utf-8")
    if plot:
        save_plot(report, plot)


def _print_table(report: Report) -> None:

    from pagedkv.integration.measure.benchmark.report import make_table

    make_console().print(make_table(report))
    for name in report.engine_names():
        print(report.describe_engine(name))


def _make_arrivals(rate: float | None, bursts: int) -> Arrivals:
    from pagedkv.integration.measure.benchmark.workloads import Arrivals

    if bursts and rate is None:
        raise ConfigError("--bursts says how many requests come together; say with --rate how many come a second")
    return Arrivals(rate, bursts)


def _parse_variants(values: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for value in values or ():
        name, _, settings = value.partition(":")
        if not re.fullmatch(r"[\w.]+", name) or not settings.strip() or name in variants:
            raise ConfigError(
                f"--variant takes NAME:KEY=VALUE, as in off:model.decoder=off, each NAME once; found {value!r}"
            )
        variants[name] = parse_settings(settings.split())
    return variants


def _parse_pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    pairs = [value.partition("=") for value in values or ()]
    for name, separator, path in pairs:
        if not name or not separator or not path:
            raise ConfigError(f"{option} takes NAME=PATH; found {name!r}")
    return {name: path for name, _, path in pairs}


def _require_places(files: Sequence[Path | None]) -> None:
    """Raises ConfigError if a file can't be written. Called before a long run, not after it."""
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ConfigError(f"{file} can't be written: it is a folder, or its folder is not there")
