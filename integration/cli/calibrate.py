"""`pagedkv calibrate`: makes static scales for 8-bit keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, parse_settings


def calibrate(
    model: Annotated[str, typer.Argument(help="Directory of the model.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (safetensors).", show_default=False)],
    kv_dtype: Annotated[str, typer.Option(help="KV dtype the scales are for: fp8_e4m3, fp8_e5m2, int8.")] = "fp8_e4m3",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text like what will be served; may be given again. By default Python's own."),
    ] = None,
    percentile: Annotated[
        float, typer.Option(help="Of the magnitudes of a head that must fit; the rest saturates. 100 fits all.")
    ] = 100.0,
    max_tokens: Annotated[int, typer.Option(min=64, help="Tokens of text to run.")] = 16384,
    sequence_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a sequence.")] = 512,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Run text through MODEL and write scales of its keys and values, per layer and head, for cache.kv_scales."""
    from pagedkv.integration.measure.extra import require_bench_extra

    require_bench_extra()
    from pagedkv.integration.measure.calibration import calibrate_scales, save_scales
    from pagedkv.plugin.config import load_config

    written = load_config(config, {**parse_settings(settings), "model.path": model})
    scales = calibrate_scales(
        written,
        text or (),
        kv_dtype,
        percentile=percentile,
        max_tokens=max_tokens,
        sequence_tokens=sequence_tokens,
    )
    save_scales(scales, output, {"kv_dtype": kv_dtype, "percentile": f"{percentile:g}", "model": model})
    if as_json:
        print(json.dumps({"file": str(output), "num_layers": len(scales) // 2, "kv_dtype": kv_dtype}))
    else:
        print(
            f"{output}: scales of {len(scales) // 2} layers; serve with "
            f"--kv-cache-dtype {kv_dtype} --kv-scales {output}"
        )
