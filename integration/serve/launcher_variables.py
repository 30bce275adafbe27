"""Translates the environment variables of text-generation-inference's launcher into keys of the config.

`VARIABLES` lists every variable that the stock server reads or the launcher sets. DROP_IN.md shows it as a table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pagedkv.plugin.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_GRAPH_SIZES = "1,2,4,8,16,32"
"""CUDA_GRAPHS as the launcher sets it if it was started without `--cuda-graphs`."""

STARTED_BY_LAUNCHER = "CUDA_MEMORY_FRACTION"
"""A variable that the launcher sets for every shard."""

_FALSE_FOR_STOCK = "neither 1 nor true"


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table."""

    name: str
    effect: Literal["honoured", "refused", "ignored"]
    meaning: str
    key: str = ""
    """The config key that takes the variable's value unchanged; empty if there is none."""
    neutral: float | None = None
    """The one supported value of a refused variable; None if there is none."""


VARIABLES: tuple[Variable, ...] = (
    Variable("RANK", "honoured", "This shard's number."),
    Variable("WORLD_SIZE", "honoured", "How many shards there are."),
    Variable("MASTER_ADDR", "honoured", "Where the shards meet."),
    Variable("MASTER_PORT", "honoured", "Where the shards meet."),
    Variable("MAX_TOTAL_TOKENS", "honoured", "`limits.max_total_tokens`.", "limits.max_total_tokens"),
    Variable("MAX_BATCH_SIZE", "honoured", "`scheduler.max_num_sequences`.", "scheduler.max_num_sequences"),
    Variable(
        "CUDA_MEMORY_FRACTION",
        "honoured",
        "`cache.memory_fraction`; at 1, which the launcher always sets, ours holds.",
    ),
    Variable("TGI_WIGGLE_ROOM", "honoured", "A factor of `CUDA_MEMORY_FRACTION`."),
    Variable(
        "CUDA_GRAPHS",
        "honoured",
        f"`graphs.batch_sizes`. At {DEFAULT_GRAPH_SIZES}, which the launcher sets where nobody asked, the file's sizes "
        "or ours hold. Not set (`--cuda-graphs 0`): no graphs.",
    ),
    Variable(
        "PREFIX_CACHING",
        "honoured",
        f"Off ({_FALSE_FOR_STOCK}) sets `cache.prefix_caching` off, if `ATTENTION` is flashinfer. With another "
        "`ATTENTION` the launcher turns it off itself, for kernels of the stock server that can't share prefixes: ours "
        "can.",
    ),
    Variable("PREFILL_CHUNKING", "honoured", f"Off ({_FALSE_FOR_STOCK}) sets `server.chunked_prefill` off."),
    Variable("HUGGINGFACE_HUB_CACHE", "honoured", "Where models of the hub are kept (also HF_HUB_CACHE, HF_HOME)."),
    Variable("HF_HUB_OFFLINE", "honoured", "Take models from that cache alone."),
    Variable("HF_TOKEN", "honoured", "The right to download a model."),
    Variable("OMP_NUM_THREADS", "honoured", "Threads on a CPU; without it, cores or CPU quota divided by the shards."),
    Variable(
        "LORA_ADAPTERS",
        "refused",
        "Adapters can't be loaded yet; serve a checkpoint with the adapter merged into it.",
    ),
    Variable(
        "ROPE_SCALING",
        "refused",
        'The checkpoint says how it scales; change "rope_scaling" in its config.json instead.',
    ),
    Variable(
        "ROPE_FACTOR",
        "refused",
        'The checkpoint says how it scales; change "rope_scaling" in its config.json instead.',
    ),
    Variable(
        "WEIGHTS_CACHE_OVERRIDE",
        "refused",
        "Give the directory with the weights, config.json and tokenizer.json as MODEL_ID instead.",
    ),
    Variable("WATERMARK_GAMMA", "refused", "It is fixed at 0.5; leave the launcher's flag out.", neutral=0.5),
    Variable("WATERMARK_DELTA", "refused", "It is fixed at 2; leave the launcher's flag out.", neutral=2.0),
    Variable("ATTENTION", "ignored", "It names kernels of the stock server; ours are picked by `kernels.name`."),
    Variable("REQUEST_LOGPROBS", "ignored", "Log-probabilities of prompts are always there for who asks for them."),
    Variable("USE_FLASH_ATTENTION", "ignored", "No flash-attention library is used; see `kernels.name`."),
    Variable(
        "DISABLE_CUSTOM_KERNELS",
        "ignored",
        'It is for the stock server\'s BLOOM and GPT-NeoX. Ours are off with `model.decoder = "off"` and '
        '`kernels.name = "reference"`.',
    ),
    Variable("USE_CUTLASS_W8A8", "ignored", "For quantized weights, which are not served."),
    Variable("EXLLAMA_VERSION", "ignored", "For quantized weights, which are not served."),
    Variable("DISABLE_EXLLAMA", "ignored", "For quantized weights, which are not served."),
    Variable("XPU_MEMORY_FRACTION", "ignored", "For Intel GPUs, which are not served."),
    Variable("ROCM_USE_FLASH_ATTN_V2_TRITON", "ignored", "It picks kernels of the stock server."),
    Variable("ROCM_USE_CUSTOM_PAGED_ATTN", "ignored", "It picks kernels of the stock server."),
    Variable("ROCM_USE_SKINNY_GEMM", "ignored", "It picks kernels of the stock server."),
    Variable("PYTORCH_TUNABLEOP_ENABLED", "ignored", "It is torch's; nothing is tuned at warm-up."),
    Variable("PYTORCH_TUNABLEOP_TUNING", "ignored", "It is torch's; nothing is tuned at warm-up."),
    Variable("PYTORCH_TUNABLEOP_SEQLENS", "ignored", "Nothing is tuned at warm-up."),
    Variable("PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP", "ignored", "It is torch's; nothing is tuned at warm-up."),
    Variable("DEBUG", "ignored", "The stock server runs without its other shards then."),
    Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "ignored", "The launcher sets it, for torch."),
    Variable("SAFETENSORS_FAST_GPU", "ignored", "The launcher sets it, for older safetensors."),
    Variable("HF_HUB_ENABLE_HF_TRANSFER", "ignored", "The launcher sets it, for older clients of the hub."),
    Variable("HF_HUB_DISABLE_PROGRESS_BARS", "honoured", "The launcher sets it: no progress bars."),
)


def find_refusals(environ: Mapping[str, str]) -> list[str]:
    """Lists the variables that are set and not supported, each with what to do instead.

    Raises:
        ConfigError: a value that must be a number is not one.
    """
    asked = [variable for variable in VARIABLES if variable.effect == "refused" and environ.get(variable.name)]
    return [
        f"{variable.name}={environ[variable.name]}: {variable.meaning[0].lower()}{variable.meaning[1:].rstrip('.')}"
        for variable in asked
        if variable.neutral is None or _read_number(environ, variable.name) != variable.neutral
    ]


def translate_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the config keys that the launcher's variables set, with their values as text. Raises ConfigError."""
    keys = {
        variable.key: environ[variable.name] for variable in VARIABLES if variable.key and environ.get(variable.name)
    }
    fraction = 1.0
    for name in ("CUDA_MEMORY_FRACTION", "TGI_WIGGLE_ROOM"):
        if environ.get(name):
            fraction *= _read_number(environ, name)
    if fraction != 1.0:
        keys["cache.memory_fraction"] = str(fraction)
    graph_sizes = _read_graph_sizes(environ)
    if graph_sizes is not None:
        keys["graphs.batch_sizes"] = graph_sizes
    if _is_off(environ, "PREFILL_CHUNKING"):
        keys["server.chunked_prefill"] = "false"
    if _is_off(environ, "PREFIX_CACHING"):
        if environ.get("ATTENTION", "flashinfer") == "flashinfer":
            keys["cache.prefix_caching"] = "false"
        else:
            logger.info(
                "PREFIX_CACHING is off for kernels of ATTENTION=%s, which can't share prefixes; ours can, and do: "
                "PAGEDKV_CACHE_PREFIX_CACHING=false turns it off",
                environ["ATTENTION"],
            )
    return keys


def _read_graph_sizes(environ: Mapping[str, str]) -> str | None:
    """Returns the sizes that the user asked for; None if the user asked for nothing."""
    sizes = environ.get("CUDA_GRAPHS")
    if STARTED_BY_LAUNCHER not in environ:
        return sizes
    if sizes is None:
        return ""
    return None if sizes.replace(" ", "") == DEFAULT_GRAPH_SIZES else sizes


def _is_off(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch is set to a value that the stock server takes for off."""
    return name in environ and environ[name].lower() not in ("1", "true")


def _read_number(environ: Mapping[str, str], name: str) -> float:
    try:
        return float(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a number (found {environ[name]!r})") from None


def markdown_table() -> str:
    """Makes the table of variables in DROP_IN.md."""
    rows = [f"| `{variable.name}` | {variable.effect} | {variable.meaning} |" for variable in VARIABLES]
    return "\n".join(["| variable | here | meaning |", "|---|---|---|", *rows])
