"""The command `text-generation-server`, which text-generation-inference's launcher starts, for our server.

The launcher's flags and variables become keys of the config. A flag or variable that is not supported is refused, never
ignored. If several set one key, the launcher's flag wins, then PAGEDKV_* variables, then the launcher's variables,
then the file that PAGEDKV_CONFIG names.

`pagedkv install-launcher-shim DIR` puts a command of this name into a folder for the launcher's PATH.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.plugin.errors import ConfigError, PagedKVError

if TYPE_CHECKING:
    from pagedkv.plugin.config import Config

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

LAUNCHER_VARIABLES = {
    "CUDA_MEMORY_FRACTION": "PAGEDKV_CACHE_MEMORY_FRACTION",
    "MAX_TOTAL_TOKENS": "PAGEDKV_LIMITS_MAX_TOTAL_TOKENS",
    "MAX_BATCH_SIZE": "PAGEDKV_SCHEDULER_MAX_NUM_SEQUENCES",
}
"""Variables of the launcher that set a key of our config. CUDA_GRAPHS is another one; `load_config` reads it."""

REFUSED_VARIABLES = {
    "LORA_ADAPTERS": "adapters can't be loaded yet; serve a checkpoint with the adapter merged into it",
    "ROPE_SCALING": 'the checkpoint says how it scales; change "rope_scaling" in its config.json instead',
    "ROPE_FACTOR": 'the checkpoint says how it scales; change "rope_scaling" in its config.json instead',
    "WEIGHTS_CACHE_OVERRIDE": "give the directory with the weights, config.json and tokenizer.json as MODEL_ID instead",
}

FIXED_VARIABLES = {"WATERMARK_GAMMA": 0.5, "WATERMARK_DELTA": 2.0}
"""Variables of the launcher for which only this value is supported."""

_UNSET_MEMORY_FRACTION = 1.0
"""CUDA_MEMORY_FRACTION as the launcher passes it if the user did not set it."""

app = typer.Typer(
    help="The model server of text-generation-inference's launcher, with pagedkv inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogLevel(str, Enum):
    """The launcher's names of log levels."""

    TRACE = "TRACE"
    DEBUG = "DEBUG"
    INFO = "INFO"
    SUCCESS = "SUCCESS"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


_PYTHON_LEVELS = {LogLevel.TRACE: "DEBUG", LogLevel.SUCCESS: "INFO"}
"""The nearest Python levels of those that Python's logging does not have."""


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The launcher's command-line flags. None or "" is a flag that it left out."""

    model_id: str
    uds_path: str
    sharded: bool = False
    quantize: str | None = None
    speculate: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    otlp_endpoint: str | None = None
    otlp_service_name: str | None = None
    max_input_tokens: int | None = None

    def refused(self) -> list[str]:
        """Lists the flags that are not supported, each with what to do instead."""
        reasons = []
        if self.quantize is not None:
            reasons.append(
                f"--quantize {self.quantize}: weights are served as the checkpoint has them; leave the flag out, and "
                "set cache.kv_dtype to make the cache smaller"
            )
        if self.speculate:
            reasons.append(f"--speculate {self.speculate}: there is no speculative decoding here; leave the flag out")
        return reasons

    def overrides(self) -> dict[str, Any]:
        """Returns the config keys that the flags set."""
        keys = {
            "model.path": self.model_id,
            "server.uds_path": self.uds_path,
            "model.dtype": self.dtype,
            "cache.kv_dtype": self.kv_cache_dtype,
            "model.revision": self.revision,
            "model.trust_remote_code": self.trust_remote_code or None,
            "tracing.otlp_endpoint": self.otlp_endpoint,
            "tracing.service_name": self.otlp_service_name,
            "limits.max_input_tokens": self.max_input_tokens,
        }
        return {key: value for key, value in keys.items() if value is not None}


def configure(flags: ServeFlags, environ: Mapping[str, str]) -> Config:
    """Makes the config of a server that the launcher starts.

    Raises:
        ConfigError: a flag or a variable is not supported (the message lists all of them), or has a bad value.
    """
    refused = flags.refused() + _refused_variables(environ)
    if refused:
        raise ConfigError("the launcher asks for what this server can't do:\n" + "\n".join(f"  {r}" for r in refused))

    from pagedkv.plugin.config import load_config
    from pagedkv.plugin.kv_dtypes import TGI_NAMES

    overrides = flags.overrides()
    if flags.kv_cache_dtype is not None:
        overrides["cache.kv_dtype"] = TGI_NAMES.get(flags.kv_cache_dtype, flags.kv_cache_dtype)
    return load_config(None, overrides, {**_translated_variables(environ), **environ})


def _refused_variables(environ: Mapping[str, str]) -> list[str]:
    refused = [f"{name}: {reason}" for name, reason in REFUSED_VARIABLES.items() if environ.get(name)]
    for name, value in FIXED_VARIABLES.items():
        if _read_number(name, environ.get(name) or str(value)) != value:
            refused.append(f"{name}={environ[name]}: it is fixed at {value}; leave the launcher's flag out")
    return refused


def _translated_variables(environ: Mapping[str, str]) -> dict[str, str]:
    found = {ours: environ[theirs] for theirs, ours in LAUNCHER_VARIABLES.items() if environ.get(theirs)}
    fraction = environ.get("CUDA_MEMORY_FRACTION")
    if fraction and _read_number("CUDA_MEMORY_FRACTION", fraction) == _UNSET_MEMORY_FRACTION:
        del found[LAUNCHER_VARIABLES["CUDA_MEMORY_FRACTION"]]
    return found


def _read_number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number (found {value!r})") from None


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

    logs.set_up_logging(_PYTHON_LEVELS.get(level, level.value), as_json=as_json, stream=sys.stdout)
    logging.captureWarnings(True)


ModelId = Annotated[str, typer.Argument(help="Directory of the model, or its name on the Hugging Face hub.")]
Revision = Annotated[str | None, typer.Option(help="Of a model that is not a directory.")]
LoggerLevel = Annotated[LogLevel, typer.Option(help="Least severe log line.")]
JsonOutput = Annotated[bool, typer.Option("--json-output", help="Log lines in JSON, for the launcher.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the model brings.")]


@app.command()
def serve(
    model_id: ModelId,
    uds_path: Annotated[Path, typer.Option(help="Unix socket; the rank is appended, as in PATH-0.")],
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
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Refused.")] = False,
    logger_level: LoggerLevel = LogLevel.INFO,
    json_output: JsonOutput = False,
) -> None:
    """Make sure that the weights of MODEL_ID are here: a directory must hold them, a hub's model is downloaded."""
    set_up_logging(logger_level, json_output)
    if merge_lora:
        raise ConfigError("--merge-lora: adapters can't be merged here; merge the adapter into a checkpoint beforehand")

    from pagedkv.integration.serve.weights import ensure_weights

    ensure_weights(model_id, extension, revision, with_code=trust_remote_code)


def run() -> None:
    """Runs the command. Prints a PagedKVError as one paragraph on standard error, which the launcher shows."""
    try:
        app(prog_name="text-generation-server")
    except PagedKVError as error:
        print(f"text-generation-server: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
