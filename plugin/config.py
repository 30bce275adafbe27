"""The configuration as written. `pagedkv.plugin.resolved_config` replaces each "auto" by a value.

A TOML file, environment variables over it, flags over both:

    backend = "paged"

    [cache]
    block_size = 16
    memory = "4GiB"

    PAGEDKV_CACHE_BLOCK_SIZE=32      one variable a key
    PAGEDKV_CONFIG=pagedkv.toml      names the file

Plugins have tables of their own, [plugins.NAME], and variables PAGEDKV_PLUGINS_NAME_KEY.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import (
    TGI_NAMES,
    known_kv_dtypes,
)
from pagedkv.plugin.plugin_names import find_plugin_key
from pagedkv.plugin.service_links import is_service_link

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "PAGEDKV_"
CONFIG_FILE_VARIABLE = "PAGEDKV_CONFIG"

PLUGINS = "plugins"
"""The section whose tables belong to plugins. `pagedkv.plugin.plugin_settings` checks them."""

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20

PositiveInt = Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(_Section):
    path: str = Field("", description="Directory of the model (safetensors, config.json, tokenizer.json).")
    adapter: str = Field("transformers", description="Model adapter: a plugin of the group pagedkv.models.")
    dtype: Auto | Literal["float32", "float16", "bfloat16"] = Field(
        AUTO,
        description='Dtype of weights and activations; "auto" is the checkpoint\'s, but on a CPU bfloat16 for float16, '
        "and float32 where the CPU has no fast products in 16 bits.",
    )
    device: str = Field(AUTO, description='"cpu", "cuda", "cuda:1"; "auto" is a GPU where there is one.')
    decoder: str = Field(
        AUTO,
        description='Fused code for models of Llama\'s shape: a plugin of pagedkv.decoders; "auto" picks by device, '
        '"off" runs the modules of transformers. Other models, float16 on a CPU and shards always run so.',
    )
    threads: Auto | PositiveInt = Field(
        AUTO,
        description='Threads that compute on the CPU; "auto" is OMP_NUM_THREADS, else the number of cores, or of CPUs '
        "of the container's quota if they are fewer, divided by the shards.",
    )
    revision: str = Field("", description="Revision of a model that is not a directory; empty is the default one.")
    trust_remote_code: bool = Field(False, description="Run Python code that the model brings.")
    allow_pickle: bool = Field(False, description="Load weights that are not safetensors; unpickling runs code.")


class CacheSection(_Section):
    manager: str = Field("paged", description="Cache manager: a plugin of the group pagedkv.cache_managers.")
    block_size: int = Field(16, description="Tokens a block: a power of two from 8 to 256.")
    kv_dtype: str = Field(
        AUTO,
        description='KV dtype: "int8", "fp8_e4m3" (or "fp8_e4m3fn"), "int4", …; "auto" is the dtype of the weights.',
    )
    kv_scales: str = Field(
        "",
        description="File of scales that pagedkv calibrate made, for 8-bit KV dtypes; without, a checkpoint's own that "
        "are for this KV dtype, else a scale per token and head.",
    )
    prefix_caching: bool = Field(True, description="Find the KV of equal prefixes instead of computing it.")
    memory: Auto | ByteSize = Field(
        AUTO, description='Bytes of the pool ("4GiB"); "auto" takes memory_fraction of the device.'
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the device's memory that weights, activations and pool may take together. On a CPU, "
        "where other programs live too, half of what is available is taken at most.",
    )
    num_blocks: Auto | PositiveInt = Field(AUTO, description="Blocks of the pool, instead of a size in bytes.")
    overcommit: float = Field(
        1.0, ge=1, le=64, description="The capacity told to the router is the physical one times this."
    )

    @field_validator("block_size")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if not 8 <= value <= 256 or value & (value - 1):
            raise ValueError("must be a power of two from 8 to 256")
        return value

    @field_validator("kv_dtype")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in (AUTO, *TGI_NAMES, *known_kv_dtypes()):
            raise ValueError(f"unknown KV dtype; known: auto, {', '.join(known_kv_dtypes())}")
        return value


class SchedulerSection(_Section):
    name: str = Field("continuous", description="Scheduler: a plugin of the group pagedkv.schedulers.")
    max_step_tokens: PositiveInt = Field(
        2048,
        description="Tokens of one step; longer prompts are computed in chunks, beside running sequences. A router's "
        "--max-batch-prefill-tokens lowers it.",
    )
    max_num_sequences: PositiveInt = Field(256, description="Sequences that run at the same time.")
    max_gap_ms: float = Field(
        0.0,
        ge=0,
        description="Longest time between two tokens of a running stream while prompts arrive, in milliseconds: their "
        "chunks are made as small as that takes, by measured step times. 0 is no bound. Not with shards, nor with the "
        "contiguous backend.",
    )
    short_prompt_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Most of a step that a long prompt leaves to short ones that came after it; what they do not use, "
        "it takes. 0 is strictly first come, first served. Paged backend.",
    )


class KernelsSection(_Section):
    name: str = Field(AUTO, description='Attention kernels: a plugin of pagedkv.kernels; "auto" picks the fastest.')


class GraphsSection(_Section):
    batch_sizes: Auto | tuple[int, ...] = Field(
        AUTO,
        description="Batch sizes at which decode steps are captured as CUDA graphs; empty is off, larger batches run "
        'without. "auto" is 1, 2, 4, 8, 16, … 64 on a GPU whose kernels allow it.',
    )

    @field_validator("batch_sizes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits "1,2,4" of an environment variable; "0" (of the launcher) is off."""
        if isinstance(value, str) and value != AUTO:
            value = [part for part in value.replace(" ", "").split(",") if part not in ("", "0")]
        return value

    @field_validator("batch_sizes")
    @classmethod
    def _are_positive(cls, value: Auto | tuple[int, ...]) -> Auto | tuple[int, ...]:
        if value != AUTO and any(size <= 0 for size in value):
            raise ValueError("must be positive numbers")
        return value


class LimitsSection(_Section):
    max_input_tokens: Auto | PositiveInt = Field(
        AUTO, description='Longest prompt; "auto" is one less than max_total_tokens.'
    )
    max_total_tokens: Auto | PositiveInt = Field(
        AUTO, description='Longest prompt and output together; "auto" is what the model was made for.'
    )


class ServerSection(_Section):
    uds_path: str = Field("", description="Unix socket; the shard's rank is appended, as in PATH-0.")
    listen: str = Field("", description="HOST:PORT for TCP; empty leaves TCP off.")
    tls_cert: str = Field("", description="PEM file of the server's certificate chain: TLS on TCP, with tls_key.")
    tls_key: str = Field("", description="PEM file of its private key.")
    tls_client_ca: str = Field(
        "", description="PEM file of who signs clients' certificates; TCP clients without one are then turned away."
    )
    cache_salt_metadata_key: str = Field(
        "",
        description="Key of the call metadata in which trusted infrastructure names the tenant of a Prefill: prompts "
        "of one tenant then never hit another's prefixes, and those of a call without it hit nothing. Empty is off.",
    )
    cached_tokens_trailer: bool = Field(
        True,
        description="Tell in the trailing metadata of a first token how many prompt tokens the prefix cache held. "
        "Never told where cache_salt_metadata_key is set.",
    )
    refusal_text: Literal["reason", "empty"] = Field(
        "reason",
        description='What a client is answered whose request is refused beside others: the reason, or "empty".',
    )
    protocols: tuple[Literal["tgi", "smg"], ...] = Field(
        ("tgi",),
        min_length=1,
        description='What clients speak: "tgi" (generate.v3, for the router of text-generation-inference), "smg" '
        "(for the SMG gateway), or both on the same addresses.",
    )
    served_model_name: str = Field(
        "", description="Name of the model in the SMG gateway's API; empty is the name of its directory."
    )
    max_live_requests: PositiveInt = Field(
        1024,
        description="Requests of the SMG gateway that may run and wait together; more are told to come later, or to go "
        "elsewhere.",
    )
    max_message_bytes: ByteSize = Field(ByteSize(DEFAULT_MAX_MESSAGE_BYTES), description="Largest gRPC message.")
    drain_timeout_s: float = Field(60.0, ge=0, description="How long SIGTERM waits for running requests.")
    stuck_step_timeout_s: float = Field(120.0, gt=0, description="Health fails when one step takes longer than this.")
    abandoned_batch_timeout_s: float = Field(
        600.0,
        gt=0,
        description="A batch for which no step was asked for so long ends: its client is dead. Shards follow the "
        "clock of rank 0.",
    )
    log_prompts: bool = Field(False, description="Put the prompt into the log's line of each ended request.")
    chunked_prefill: bool = Field(
        True, description="Tell the router that new and running requests may share a step (paged backend)."
    )

    @field_validator("protocols", mode="before")
    @classmethod
    def _split_protocols(cls, value: object) -> object:
        """Splits a string, as environment variables and flags have it: "tgi,smg"."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_tcp_for_gateways(self) -> ServerSection:
        if len(set(self.protocols)) < len(self.protocols):
            raise ValueError("protocols names one twice")
        if "smg" in self.protocols and not self.listen and self.uds_path:
            raise ValueError('protocols has "smg", and its gateway connects over TCP alone: set listen to HOST:PORT')
        return self

    @field_validator("cache_salt_metadata_key")
    @classmethod
    def _is_metadata_key(cls, value: str) -> str:
        if value and (not re.fullmatch("[a-z0-9_.-]+", value) or value.startswith("grpc-") or value.endswith("-bin")):
            raise ValueError("must be a key of gRPC metadata: a-z, 0-9, _ . -, neither grpc-… nor …-bin")
        return value

    @model_validator(mode="after")
    def _has_tls_whole(self) -> ServerSection:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key belong together: set both, or none")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.tls_cert and not self.listen:
            raise ValueError("tls_cert is for TCP: set listen, or leave it out; the Unix socket is its owner's alone")
        return self


class MetricsSection(_Section):
    listen: str = Field(
        AUTO,
        description="HOST:PORT of the metrics for Prometheus; shard RANK takes PORT + RANK, port 0 any free one. Empty "
        'is off; "auto" is 127.0.0.1:9464 for pagedkv serve, and off for the launcher\'s text-generation-server.',
    )


class TracingSection(_Section):
    otlp_endpoint: str = Field(
        "", description="URL to which traces of requests go by OTLP over gRPC; empty is off. Needs the extra otel."
    )
    service_name: str = Field("pagedkv", description="What the traces call this server.")


PluginTables = Mapping[str, Mapping[str, Any]]
"""Settings by name of plugin and key."""


class Config(_Section):
    """The configuration as written."""

    backend: str = Field("paged", description='The KV cache: "paged" or "contiguous"; a plugin of pagedkv.backends.')
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe log line.")
    model: ModelSection = ModelSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    kernels: KernelsSection = KernelsSection()
    graphs: GraphsSection = GraphsSection()
    limits: LimitsSection = LimitsSection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    plugins: dict[str, dict[str, Any]] = Field(
        {}, description="Settings of plugins: a table [plugins.NAME] for each, with the keys that the plugin takes."
    )


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key, for tables and lookups."""

    path: str
    default: Any
    description: str

    @property
    def environment_variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.path.replace(".", "_").upper()


def list_config_keys() -> list[ConfigKey]:
    return list(_walk_keys(Config, ""))


def _walk_keys(section: type[BaseModel], prefix: str) -> Iterator[ConfigKey]:
    for name, info in section.model_fields.items():
        if prefix + name == PLUGINS:
            continue  # its keys are the plugins' own
        if isinstance(info.default, _Section):
            yield from _walk_keys(type(info.default), f"{prefix}{name}.")
        else:
            yield ConfigKey(prefix + name, info.default, info.description or "")


def load_config(
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads the configuration: the file, environment variables over it, overrides (flags) over both.

    Args:
        file: a TOML file; None takes the one that `PAGEDKV_CONFIG` names, if any.
        overrides: values by dotted key ("cache.block_size").
        environ: None is the process's environment.

    Raises:
        ConfigError: an unreadable file, an unknown key (the nearest known one is named), a bad value.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(CONFIG_FILE_VARIABLE) or None
    values: dict[str, Any] = _read_toml(Path(file)) if file else {}
    for key, value in {**_read_environment(environ), **(overrides or {})}.items():
        _set_dotted(values, key, value)
    return parse_config(values, source=str(file) if file else "the configuration")


def parse_config(values: Mapping[str, Any], source: str = "the configuration") -> Config:
    """Validates nested values. Raises ConfigError with every fault, one a line."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        faults = dict.fromkeys(_explain_fault(detail) for detail in cast("list[dict[str, Any]]", error.errors()))
        raise ConfigError(f"{source} is not valid:\n" + "\n".join(f"  {fault}" for fault in faults)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid TOML file: {error}") from error
    return values


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = {key.environment_variable: key.path for key in list_config_keys()}
    values = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_FILE_VARIABLE:
            continue
        if variable not in known:
            if is_service_link(variable):
                continue
            if path := find_plugin_key(variable.removeprefix(ENVIRONMENT_PREFIX)):
                values[path] = value
                continue
            raise ConfigError(f"unknown environment variable {variable}{_hint(variable, list(known))}")
        values[known[variable]] = value
    return values


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        nested = values.setdefault(section, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"{section} must be a table, not {nested!r}")
        values = nested
    values[name] = value


def _explain_fault(detail: Mapping[str, Any]) -> str:
    known = [key.path for key in list_config_keys()]
    known_parts = set(known) | {path.split(".")[0] for path in known} | {PLUGINS}
    parts = [str(part) for part in detail["loc"]]
    while len(parts) > 1 and ".".join(parts) not in known_parts and ".".join(parts[:-1]) in known:
        parts.pop()
    path = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {path}{_hint(path, sorted(known_parts))}"
    return f"{path}: {detail['msg'].removeprefix('Value error, ')} (found {detail['input']!r})"


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
