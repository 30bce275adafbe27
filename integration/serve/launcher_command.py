"""The command `text-generation-server`, which text-generation-inference's launcher starts, for our server.

The launcher's flags (`launcher_flags`) and variables (`launcher_variables`) become keys of the config. If several set
one key, the launcher's flag wins, then PAGEDKV_* variables, then the launcher's variables, then the file that
PAGEDKV_CONFIG names.

`pagedkv install-launcher-shim DIR` puts a command of this name into a folder for the launcher's PATH.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.integration.progress_bars import hide_progress_bars
from pagedkv.integration.serve.launcher_flags import LogLevel, ServeFlags
from pagedkv.integration.serve.launcher_variables import find_refusals, translate_variables
from pagedkv.plugin.errors import ConfigError, PagedKVError
from pagedkv.plugin.threads import spare_quota

if TYPE_CHECKING:
    from pagedkv.plugin.config import Config

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

DEFAULT_UDS_PATH = Path("/tmp/text-generation-server")  # noqa: S108 # the launcher's and the stock server's default

app = typer.Typer(
    help="The model server of text-generation-inference's launcher, with pagedkv inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a wrong flag is a plain line in the launcher's log, no frame
)


def configure(flags: ServeFlags, environ: Mapping[str, str]) -> Config:
    """Makes the config of a server that the launcher starts.

    Raises:
        ConfigError: a flag or a variable is not supported (the message lists all of them), or has a bad value.
    """
    _refuse(flags.refused() + find_refusals(environ))

    from pagedkv.plugin.config import ENVIRONMENT_PREFIX, load_config

    translated = {
        ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): value for key, value in translate_variables(environ).items()
    }
    return load_config(None, flags.overrides(), {**translated, **environ})


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise ConfigError("the launcher asks for what this server can't do: " + " | ".join(reasons))


def read_shard(environ: Mapping[str, str], sharded: bool) -> tuple[int, int]:
    """Reads this process's rank and the number of shards from RANK and WORLD_SIZE. Raises ConfigError."""
    try:
        rank, num_shards = int(environ.get("RANK") or 0), int(environ.get("WORLD_SIZE") or 1)
    except ValueError:
        raise ConfigError(
            f"RANK and WORLD_SIZE must be numbers (found {environ.get('RANK')!r}, {environ.get('WORLD_SIZE')!r})"
        ) from None
    if not 0 <= rank < num_shards:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {num_shards}; ranks go from 0 to WORLD_SIZE - 1")
    if sharded and num_shards == 1:
        raise ConfigError("--sharded needs WORLD_SIZE of 2 or more, RANK, MASTER_ADDR and MASTER_PORT")
    return rank, num_shards


def set_up_logging(level: LogLevel, as_json: bool) -> None:
    """Logs to standard output, which the launcher reads."""
    from pagedkv.integration.serve import logs

    logs.set_up_logging(level.python_name, as_json=as_json, stream=sys.stdout)
    logging.captureWarnings(True)


ModelId = Annotated[str, typer.Argument(help="Directory of the model, or its name on the Hugging Face hub.")]
Revision = Annotated[str | None, typer.Option(help="Of a model that is not a directory.")]
LoggerLevel = Annotated[LogLevel, typer.Option(help="Least severe log line.")]
JsonOutput = Annotated[bool, typer.Option("--json-output", help="Log lines in JSON, for the launcher.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the model brings.")]


@app.command()
def serve(
    model_id: ModelId,
    uds_path: Annotated[Path, typer.Option(help="Unix socket; the rank is appended, as in PATH-0.")] = DEFAULT_UDS_PATH,
    revision: Revision = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="Be one of WORLD_SIZE shards.")] = False,
    quantize: Annotated[str | None, typer.Option(help="Refused.")] = None,
    speculate: Annotated[int | None, typer.Option(help="Refused above 0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float16, bfloat16.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="fp8_e4m3fn, fp8_e5m2, or any KV dtype of ours.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    logger_level: LoggerLevel = LogLevel.INFO,
    json_output: JsonOutput = False,
    otlp_endpoint: Annotated[str | None, typer.Option(help="URL to which traces go, by OTLP over gRPC.")] = None,
    otlp_service_name: Annotated[str | None, typer.Option(help="What the traces call this server.")] = None,
    max_input_tokens: Annotated[int | None, typer.Option(help="Longest prompt.")] = None,
) -> None:
    """Serve MODEL_ID on a Unix socket until SIGTERM, which lets running requests finish. The router warms it up."""
    set_up_logging(logger_level, json_output)
    flags = ServeFlags(
        model_id=model_id,
        uds_path=str(uds_path),
        sharded=sharded,
        quantize=quantize,
        speculate=speculate,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        trust_remote_code=trust_remote_code,
        revision=revision,
        otlp_endpoint=otlp_endpoint,
        otlp_service_name=otlp_service_name,
        max_input_tokens=max_input_tokens,
    )
    config = configure(flags, os.environ)
    rank, num_shards = read_shard(os.environ, sharded)

    from pagedkv.integration.serve.process import run_server

    raise typer.Exit(run_server(config, None, rank=rank, num_shards=num_shards))


@app.command()
def download_weights(
    model_id: ModelId,
    revision: Revision = None,
    extension: Annotated[str, typer.Option(help="Of the weights; only .safetensors can be served.")] = ".safetensors",
    trust_remote_code: TrustRemoteCode = False,
    merge_lora: Annotated[
        bool,
        typer.Option("--merge-lora", help="The launcher always asks for it. A model that is an adapter is refused."),
    ] = False,
    logger_level: LoggerLevel = LogLevel.INFO,
    json_output: JsonOutput = False,
) -> None:
    """Make sure that the weights of MODEL_ID are here: a directory must hold them, a hub's model is downloaded."""
    set_up_logging(logger_level, json_output)

    from pagedkv.integration.serve.chat_template import warn_of_hidden_template
    from pagedkv.integration.serve.weights import ensure_weights
    from pagedkv.plugin.config import load_config

    # Before a long download: the shards, which are started after it, would refuse these.
    _refuse(find_refusals(os.environ))
    allow_pickle = load_config().model.allow_pickle
    directory = ensure_weights(model_id, extension, revision, with_code=trust_remote_code, allow_pickle=allow_pickle)
    warn_of_hidden_template(directory, model_id, os.environ)


def run() -> None:
    """Runs the command. Prints a PagedKVError as one line.

    The launcher shows it twice: the log line on standard output, which is JSON, and standard error, which it prints
    when a process has failed.
    """
    # The launcher always sets it; huggingface_hub no longer supports it and warns at each start.
    os.environ.pop("HF_HUB_ENABLE_HF_TRANSFER", None)
    spare_quota()  # before a command loads torch
    hide_progress_bars()
    try:
        app(prog_name="text-generation-server")
    except PagedKVError as error:
        line = " ".join(str(error).split())
        if "--json-output" in sys.argv:
            logger.error("%s", line)
        print(f"text-generation-server: {line}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
