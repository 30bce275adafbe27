"""Every metric: name, unit, meaning, and where its value comes from. The table of the docs is made from this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pagedkv.plugin.stats import BackendStats

BASE_LABELS = ("backend", "rank")
"""Labels of every metric: the backend's name and the shard's rank."""

Values = float | Mapping[str, float]
"""One value, or one for each value of the metric's own label."""

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of one scrape, all from the same moment between two steps."""

    stats: BackendStats
    last_step_timestamp_s: float
    """Unix time of the end of the last step; before the first step, of the server's start."""
    step_running_s: float
    is_healthy: bool


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `read` is None for metrics that count events, and for `info` and GPUs."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    label: str | None = None
    """The metric's own label, in addition to BASE_LABELS."""
    buckets: Sequence[float] = ()
    read: Callable[[Snapshot], Values] | None = None


def _events(name: str, unit: str, meaning: str, label: str) -> Metric:
    return Metric(name, "counter", unit, meaning, label)


def _histogram(name: str, unit: str, meaning: str, buckets: Sequence[float], label: str | None = None) -> Metric:
    return Metric(name, "histogram", unit, meaning, label, buckets)


def _counter(name: str, meaning: str, read: Callable[[Snapshot], Values], label: str | None = None) -> Metric:
    unit = "tokens" if "_tokens_" in name else name.split("_")[-2]
    return Metric(name, "counter", unit, meaning, label, read=read)


def _gauge(
    name: str, unit: str, meaning: str, read: Callable[[Snapshot], Values] | None, label: str | None = None
) -> Metric:
    return Metric(name, "gauge", unit, meaning, label, read=read)


TTFT = _histogram(
    "pagedkv_time_to_first_token_seconds", "seconds", "A request's arrival to its first token.", _LATENCY_BUCKETS_S
)
TPOT = _histogram(
    "pagedkv_time_per_output_token_seconds",
    "seconds",
    "Mean over a request's tokens after the first, once it has ended by itself.",
    _TOKEN_BUCKETS_S,
)
QUEUE_TIME = _histogram(
    "pagedkv_queue_time_seconds",
    "seconds",
    "A request's arrival to the first step that runs it; of requests that got a token.",
    _LATENCY_BUCKETS_S,
)
REQUEST_DURATION = _histogram(
    "pagedkv_request_duration_seconds",
    "seconds",
    "A request's arrival to its end, however it ended.",
    _REQUEST_BUCKETS_S,
)
STEP_DURATION = _histogram(
    "pagedkv_step_duration_seconds",
    "seconds",
    "One step, by `phase`: `prefill` ran prompts alone, `decode` one token of each request, `mixed` both.",
    _STEP_BUCKETS_S,
    "phase",
)
PROMPT_LENGTH = _histogram(
    "pagedkv_request_prompt_tokens", "tokens", "Prompt of a request that has ended.", _LENGTH_BUCKETS
)
OUTPUT_LENGTH = _histogram(
    "pagedkv_request_generated_tokens", "tokens", "Output of a request that has ended.", _LENGTH_BUCKETS
)
REQUESTS = _events(
    "pagedkv_requests_total",
    "requests",
    "Requests that have ended, by `outcome`: `length`, `eos_token`, `stop_sequence`; `aborted` by the client; "
    "`abandoned` by a client that is dead; `failed` in a step.",
    "outcome",
)
REFUSED = _events(
    "pagedkv_refused_requests_total",
    "requests",
    "Requests not taken, by `reason`: `invalid`, `unsupported`, `too_long`, `duplicate` id, `unknown_batch`, "
    "`not_ready`, `overloaded`, `draining`, `failed` to be read.",
    "reason",
)
INFO = _gauge(
    "pagedkv_info",
    "–",
    "1; in its labels `version`, `model`, `dtype`, `kv_dtype` and `attention_kernels`.",
    None,
)
GPU_MEMORY_USED = _gauge(
    "pagedkv_gpu_memory_used_bytes", "bytes", "Of the GPU `gpu`, by all programs. (NVML)", None, "gpu"
)
GPU_MEMORY_TOTAL = _gauge("pagedkv_gpu_memory_total_bytes", "bytes", "Of the GPU `gpu`. (NVML)", None, "gpu")
GPU_UTILIZATION = _gauge(
    "pagedkv_gpu_utilization_ratio", "0..1", "Share of time in which the GPU `gpu` ran a kernel. (NVML)", None, "gpu"
)

INFO_LABELS = ("version", "model", "dtype", "kv_dtype", "attention_kernels")

GPU_METRICS = (GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_UTILIZATION)
"""Metrics that are served only if NVML finds the server's GPU."""

CATALOGUE: tuple[Metric, ...] = (
    TTFT,
    TPOT,
    QUEUE_TIME,
    REQUEST_DURATION,
    STEP_DURATION,
    PROMPT_LENGTH,
    OUTPUT_LENGTH,
    REQUESTS,
    REFUSED,
    _counter("pagedkv_prompt_tokens_total", "Prompts of requests that were taken.", lambda s: s.stats.prompt_tokens),
    _counter("pagedkv_generated_tokens_total", "Tokens that requests were given.", lambda s: s.stats.generated_tokens),
    _counter(
        "pagedkv_computed_tokens_total",
        "Tokens that steps ran, by `phase`: `prefill` of prompts and after preemptions, `decode` one of each request.",
        lambda s: {"prefill": s.stats.computed_prefill_tokens, "decode": s.stats.computed_decode_tokens},
        "phase",
    ),
    _counter(
        "pagedkv_prefix_query_tokens_total",
        "Prompt tokens looked up in the prefix cache, once a request.",
        lambda s: s.stats.prefix_cache_query_tokens,
    ),
    _counter(
        "pagedkv_prefix_hit_tokens_total",
        "Of these, tokens found; what is found again after a preemption is not among them.",
        lambda s: s.stats.prefix_cache_hit_tokens,
    ),
    _counter(
        "pagedkv_saved_prefill_tokens_total",
        "Prompt tokens not computed, by a hit or a fork.",
        lambda s: s.stats.saved_prefill_tokens,
    ),
    _counter(
        "pagedkv_recomputed_tokens_total",
        "Tokens computed again after a preemption.",
        lambda s: s.stats.recomputed_tokens,
    ),
    _counter("pagedkv_preemptions_total", "Running requests that lost their blocks.", lambda s: s.stats.preemptions),
    _counter("pagedkv_evictions_total", "Cached blocks given to new content.", lambda s: s.stats.evictions),
    _counter("pagedkv_copies_total", "Blocks copied on write.", lambda s: s.stats.copies),
    _gauge("pagedkv_requests_running", "requests", "Requests that hold blocks.", lambda s: s.stats.running),
    _gauge(
        "pagedkv_requests_waiting", "requests", "Requests in the queue, preempted ones too.", lambda s: s.stats.waiting
    ),
    _gauge(
        "pagedkv_cache_blocks",
        "blocks",
        "By `state`: `used` by a request, `cached` (content kept, evicted when needed), `free`.",
        lambda s: {
            "used": s.stats.num_used_blocks,
            "cached": s.stats.num_cached_blocks,
            "free": s.stats.num_free_blocks,
        },
        "state",
    ),
    _gauge("pagedkv_cache_total_blocks", "blocks", "Blocks of the pool.", lambda s: s.stats.num_total_blocks),
    _gauge(
        "pagedkv_cache_block_size_tokens",
        "tokens",
        "Of one block; 1 for the contiguous backend, which counts slots.",
        lambda s: s.stats.block_size,
    ),
    _gauge(
        "pagedkv_cache_utilization_ratio",
        "0..1",
        "Used blocks of all blocks; a contiguous cache's room for longest answers of all its room.",
        lambda s: s.stats.block_utilization,
    ),
    _gauge(
        "pagedkv_cache_fragmentation_ratio",
        "0..1",
        "Slots without a token among those of used blocks.",
        lambda s: s.stats.fragmentation,
    ),
    _gauge(
        "pagedkv_kv_used_bytes", "bytes", "Of slots that hold a token of a request.", lambda s: s.stats.kv_bytes_in_use
    ),
    _gauge("pagedkv_kv_reserved_bytes", "bytes", "Of used blocks.", lambda s: s.stats.kv_bytes_reserved),
    _gauge("pagedkv_kv_total_bytes", "bytes", "Of the pool of this shard.", lambda s: s.stats.kv_bytes_total),
    _gauge(
        "pagedkv_step_running_seconds",
        "seconds",
        "How long the step that runs now has been running; 0 between steps.",
        lambda s: s.step_running_s,
    ),
    _gauge(
        "pagedkv_last_step_timestamp_seconds",
        "seconds",
        "Unix time of the end of the last step; before the first, of the start.",
        lambda s: s.last_step_timestamp_s,
    ),
    _gauge("pagedkv_healthy", "0 or 1", "Whether Health answers well.", lambda s: float(s.is_healthy)),
    INFO,
    *GPU_METRICS,
)


def markdown_table() -> str:
    """The catalogue as a Markdown table."""
    rows = [f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.meaning} |" for metric in CATALOGUE]
    return "\n".join(["| metric | type | unit | meaning |", "|---|---|---|---|", *rows])
