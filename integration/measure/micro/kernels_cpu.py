"""Times attention kernels on this CPU beside torch's own attention and beside the memory's speed.

    python integration/measure/micro/kernels_cpu.py [--kernels cpu] [--threads N] [--json]

Decode: 8 sequences of 3072 tokens, 9 query and 3 KV heads of 64, blocks of 16 in random order, one layer.
Prefill: one prompt of 2048 tokens with the same heads.
What is compared runs in turn, in one process and on the same threads; each figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.integration.measure.benchmark.machine import describe_machine
from pagedkv.plugin.abilities import MeasuresCandidates
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.kv_dtypes import KVDtype, find_kv_dtype, known_kv_dtypes
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.registry import KERNELS, load_plugin

NUM_SEQUENCES = 8
CONTEXT_TOKENS = 3072
PROMPT_TOKENS = 2048
BLOCK_SIZE = 16
SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64)
OPTIONS = AttentionOptions(scale=SPEC.head_dim**-0.5)
DTYPE = torch.bfloat16

READ_BYTES = 256 * 2**20
"""Far more than the last-level cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Repetitions of a run."""

    num_decodes: int = 50
    num_prefills: int = 7
    num_reads: int = 9


def measure(kernels: AttentionKernels, sizes: Sizes) -> dict[str, float]:
    """All figures: medians in milliseconds, `_gbps` in 10^9 bytes a second, ratios where above 1 is in our favour."""
    if isinstance(kernels, MeasuresCandidates):
        kernels.measure([(SPEC, SPEC.cache_spec(BLOCK_SIZE, x), DTYPE) for x in _supported_kv_dtypes(kernels)])
    figures = {"read_gbps": _measure_read(sizes.num_reads)}
    figures |= _measure_decode(kernels, sizes.num_decodes)
    figures |= _measure_prefill(kernels, sizes.num_prefills)
    bytes_read = NUM_SEQUENCES * CONTEXT_TOKENS * SPEC.cache_spec(BLOCK_SIZE, find_kv_dtype("bf16")).bytes_per_token
    figures["decode_gbps"] = bytes_read / figures["decode_bf16_ms"] / 1e6
    figures["decode_memory_fraction"] = figures["decode_gbps"] / figures["read_gbps"]
    figures["decode_over_sdpa"] = figures["decode_sdpa_ms"] / figures["decode_bf16_ms"]
    figures["prefill_over_sdpa"] = figures["prefill_sdpa_ms"] / figures["prefill_ms"]
    # A causal prompt needs half of the scores: two products of 2 × head size operations each.
    operations = 2 * 2 * SPEC.head_dim * SPEC.num_heads * PROMPT_TOKENS**2 / 2
    figures["prefill_gflops"] = operations / figures["prefill_ms"] / 1e6
    if "decode_int8_ms" in figures:
        figures["int8_over_bf16"] = figures["decode_bf16_ms"] / figures["decode_int8_ms"]
    return figures


def _measure_read(num_runs: int) -> float:
    """Bandwidth of the fastest read that torch has on all threads, in 10^9 bytes a second."""
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _time_in_turn({"read": data.sum}, num_runs)["read"] / 1e6


def _measure_decode(kernels: AttentionKernels, num_runs: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    num_blocks = NUM_SEQUENCES * CONTEXT_TOKENS // BLOCK_SIZE
    block_table = torch.randperm(num_blocks, generator=generator).int().view(NUM_SEQUENCES, -1)
    k, v = torch.randn(2, NUM_SEQUENCES * CONTEXT_TOKENS, SPEC.num_kv_heads, SPEC.head_dim, generator=generator).to(
        DTYPE
    )
    q = torch.randn(NUM_SEQUENCES, SPEC.num_heads, SPEC.head_dim, generator=generator).to(DTYPE)
    runs: dict[str, Callable[[], object]] = {"decode_sdpa_ms": lambda: _gather_and_attend(q, k, v, block_table)}
    metadata = _metadata([CONTEXT_TOKENS] * NUM_SEQUENCES, [1] * NUM_SEQUENCES, block_table)
    for kv_dtype in _supported_kv_dtypes(kernels):
        storage = _fill(kernels, kv_dtype, k, v)
        runs[f"decode_{kv_dtype.name}_ms"] = partial(kernels.attend, q, storage, metadata, OPTIONS)
    return _time_in_turn(runs, num_runs)


def _measure_prefill(kernels: AttentionKernels, num_runs: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    block_table = torch.randperm(PROMPT_TOKENS // BLOCK_SIZE, generator=generator).int()[None]
    k, v = torch.randn(2, PROMPT_TOKENS, SPEC.num_kv_heads, SPEC.head_dim, generator=generator).to(DTYPE)
    q = torch.randn(PROMPT_TOKENS, SPEC.num_heads, SPEC.head_dim, generator=generator).to(DTYPE)
    storage = _fill(kernels, find_kv_dtype("bf16"), k, v)
    metadata = _metadata([PROMPT_TOKENS], [PROMPT_TOKENS], block_table)
    heads_first = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    return _time_in_turn(
        {
            "prefill_ms": lambda: kernels.attend(q, storage, metadata, OPTIONS),
            "prefill_sdpa_ms": lambda: scaled_dot_product_attention(
                heads_first[0], heads_first[1], heads_first[2], is_causal=True, scale=OPTIONS.scale, enable_gqa=True
            ),
        },
        num_runs,
    )


def _gather_and_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """What a paged cache costs with torch alone: k and v gathered block by block, then torch's attention."""
    keys, values = (x.view(-1, BLOCK_SIZE, *x.shape[1:])[block_table].flatten(1, 2).transpose(1, 2) for x in (k, v))
    return scaled_dot_product_attention(q[:, :, None], keys, values, scale=OPTIONS.scale, enable_gqa=True)


def _supported_kv_dtypes(kernels: AttentionKernels) -> list[KVDtype]:
    # Variants with scales from outside the blocks have the elements of the others.
    kv_dtypes = [x for x in map(find_kv_dtype, known_kv_dtypes()) if not x.has_static_scales]
    return [x for x in kv_dtypes if not kernels.unsupported_reasons(SPEC, SPEC.cache_spec(BLOCK_SIZE, x), DTYPE)]


def _fill(kernels: AttentionKernels, kv_dtype: KVDtype, k: torch.Tensor, v: torch.Tensor) -> KVStorage:
    """Storage that holds k and v: [num_tokens, num_kv_heads, head_dim], token i at slot i."""
    num_tokens = k.shape[0]
    storage = kernels.allocate(SPEC.cache_spec(BLOCK_SIZE, kv_dtype), num_tokens // BLOCK_SIZE)
    block_table = torch.arange(num_tokens // BLOCK_SIZE, dtype=torch.int32)[None]
    kernels.store(storage, k, v, _metadata([num_tokens], [num_tokens], block_table))
    return storage


def _metadata(seq_lens: Sequence[int], num_queries: Sequence[int], block_table: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *num_queries]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.arange(sum(num_queries)),
        max_query_len=max(num_queries),
        max_seq_len=max(seq_lens),
        num_decodes=sum(count == 1 for count in num_queries),
    )


def _time_in_turn(runs: Mapping[str, Callable[[], object]], num_runs: int) -> dict[str, float]:
    """Median milliseconds of each, run by turns so that all meet the same disturbances."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for attempt in range(num_runs + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if attempt:  # the first one warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="cpu", help="name of a plugin of pagedkv.kernels")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = load_plugin(KERNELS, arguments.kernels).create(torch.device("cpu"))
    figures = measure(kernels, Sizes())
    about = {
        "cpu": describe_machine().processor,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": arguments.threads,
        "kernels": kernels.name,
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(about | {name: round(value, 3) for name, value in figures.items()}, indent=2))
        return
    for name, value in about.items():
        print(f"{name:24} {value}")
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")


if __name__ == "__main__":
    main()
