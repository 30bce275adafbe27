"""`pagedkv eval-kv`: measures what each KV dtype costs in accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, make_console, parse_settings


def eval_kv(
    model: Annotated[str, typer.Argument(help="Directory of the model.", show_default=False)],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to evaluate on; may be given again. By default Python's own: help topics and sources."),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="KV dtype to evaluate; may be given again. By default bf16, fp8 twice, int8 and int4."),
    ] = None,
    kv_scales: Annotated[str, typer.Option(help="File of scales, for KV dtypes with static ones.")] = "",
    max_tokens: Annotated[int, typer.Option(min=64, help="Tokens of prose, and of code.")] = 20480,
    sequence_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a sequence.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences computed side by side.")] = 16,
    recall_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a recall prompt; 0 leaves recall out.")] = 1024,
    plot: Annotated[
        Path | None, typer.Option(help="Draw perplexity over bytes into this file (png, svg, pdf).")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure, through the paged cache, what each KV dtype costs MODEL in accuracy."""
    from pagedkv.integration.measure.extra import require_bench_extra

    require_bench_extra()
    from pagedkv.integration.measure.evaluation.evaluate import DEFAULT_KV_DTYPES, EvaluationSettings, evaluate
    from pagedkv.integration.measure.evaluation.report import make_table, save_plot
    from pagedkv.plugin.config import load_config

    written = load_config(config, {**parse_settings(settings), "model.path": model})
    evaluation = EvaluationSettings(
        text_files=text or (),
        kv_dtypes=tuple(kv_dtype or DEFAULT_KV_DTYPES),
        kv_scales=kv_scales,
        max_tokens=max_tokens,
        sequence_tokens=sequence_tokens,
        max_batch_size=batch_size,
        recall_tokens=recall_tokens,
    )
    report = evaluate(written, evaluation)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        make_console().print(make_table(report))
    if plot:
        save_plot(report, plot)
