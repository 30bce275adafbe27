"""`pagedkv serve`: serves a model over gRPC."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, parse_settings
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.plugin.config import Config

DEFAULT_ADDRESS = "127.0.0.1:8033"
"""Address of a server without a configured one, and default target of a client."""

DEFAULT_METRICS_ADDRESS = "127.0.0.1:9464"
"""Default address of metrics; OpenTelemetry assigns this port to Prometheus exporters."""


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Directory of the model; may stand in the config instead.", show_default=False)
    ] = None,
    config: ConfigFile = None,
    backend: Annotated[str | None, typer.Option(help="The KV cache: paged, contiguous, or a plugin's.")] = None,
    uds_path: Annotated[str | None, typer.Option(help="Unix socket; the rank is appended, as in PATH-0.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"TCP address. Without any: {DEFAULT_ADDRESS}.")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="What clients speak: tgi (the default), smg for the SMG gateway, or tgi,smg for both."),
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="KV dtype; auto is the model's.")] = None,
    kv_scales: Annotated[
        str | None, typer.Option(help="File of scales for an 8-bit KV dtype, made by pagedkv calibrate.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, float16, bfloat16; or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; or auto.")] = None,
    num_shards: Annotated[
        int, typer.Option(min=1, help="Split the model over so many processes; a router calls all of them at once.")
    ] = 1,
    rank: Annotated[
        int | None, typer.Option(min=0, hidden=True, help="Be this one of them, with MASTER_ADDR and MASTER_PORT.")
    ] = None,
    ready_fd: Annotated[
        int | None, typer.Option(min=3, hidden=True, help="Write the summary to this open file, as JSON.")
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f'Address of the metrics for Prometheus. Without any: {DEFAULT_METRICS_ADDRESS}; "" is off.',
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send traces there, by OTLP over gRPC.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json-output", help="Log lines in JSON.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Serve MODEL over gRPC, until SIGTERM or Ctrl-C; both let running requests finish."""
    flags = {
        "model.path": model,
        "backend": backend,
        "server.uds_path": uds_path,
        "server.listen": listen,
        "server.protocols": protocol,
        "cache.kv_dtype": kv_cache_dtype,
        "cache.kv_scales": kv_scales,
        "model.dtype": dtype,
        "model.device": device,
        "metrics.listen": metrics_listen,
        "tracing.otlp_endpoint": otlp_endpoint,
    }
    overrides = parse_settings(settings) | {key: value for key, value in flags.items() if value is not None}
    if rank is not None and rank >= num_shards:
        raise ConfigError(f"--rank {rank} is none of {num_shards} shards; ranks go from 0 to {num_shards - 1}")
    written = _load(config, overrides, num_shards)

    from pagedkv.integration.serve.child_process import command_path
    from pagedkv.integration.serve.logs import set_up_logging
    from pagedkv.integration.serve.process import ServerSummary, run_server

    def announce(summary: ServerSummary) -> None:
        if ready_fd is None:
            print(summary.to_json() if as_json else summary.to_text(), flush=True)
        else:
            with open(ready_fd, "w", encoding="utf-8") as pipe:
                pipe.write(summary.to_json() + "\n")

    if num_shards > 1 and rank is None:
        from pagedkv.integration.serve.supervisor import supervise

        set_up_logging(written.log_level, as_json=json_output)
        raise typer.Exit(supervise([command_path(), *sys.argv[1:]], num_shards, announce))
    set_up_logging(written.log_level, origin="" if rank is None else f"rank {rank}: ", as_json=json_output)
    raise typer.Exit(run_server(written, announce, rank=rank or 0, num_shards=num_shards))


def _load(file: Any, overrides: dict[str, Any], num_shards: int) -> Config:
    from pagedkv.plugin.config import AUTO, load_config

    written = load_config(file, overrides)
    if written.metrics.listen == AUTO:
        overrides = {**overrides, "metrics.listen": DEFAULT_METRICS_ADDRESS}
        written = load_config(file, overrides)
    if num_shards > 1:
        from pagedkv.integration.serve.shards import refuse_tcp

        refuse_tcp(written)
    elif not written.server.uds_path and not written.server.listen:
        written = load_config(file, {**overrides, "server.listen": DEFAULT_ADDRESS})
    return written
