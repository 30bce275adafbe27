"""The triton kernels on this machine's GPU: right first, then how fast.

    python integration/measure/micro/gpu.py [--json gpu.json]

Checks values against float64 dense attention in float16 and bfloat16, then measures decode bandwidth (bytes of KV read
over time, beside the bandwidth of a large copy on the same device in the same run) for each KV dtype, the rate of
prefill beside torch's own attention on contiguous tensors, and decode steps of the demo model's shape with and without
CUDA graphs. Under 8 minutes; needs torch and triton and no installation of pagedkv. Exit code: 0 when all values are
right, 1 when one is not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]


def _make_importable() -> None:
    """Lets a checkout run without installation: `pagedkv.X` is the folder X."""
    try:
        import pagedkv.plugin  # noqa: F401
    except ImportError:
        package = Path(tempfile.mkdtemp()) / "pagedkv"
        package.mkdir()
        for name in ("plugin", "kernels", "integration"):
            (package / name).symlink_to(ROOT / name)
        sys.path.insert(0, str(package.parent))


# Run as a file, the script's folder leads `sys.path`; nothing there is meant to be imported.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, Path(__file__).parent)]
_make_importable()

from pagedkv.integration.measure.micro.gpu_steps import DEMO_SHAPE, measure_steps  # noqa: E402
from pagedkv.integration.measure.micro.gpu_steps import make_weights as make_decoder_weights  # noqa: E402
from pagedkv.kernels.triton.decoder import TritonDecoderKernels  # noqa: E402
from pagedkv.kernels.triton.provider import TritonKernels  # noqa: E402
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions  # noqa: E402
from pagedkv.plugin.conformance.attention_oracle import (  # noqa: E402
    attend_as_torch,
    attend_exactly,
    count_blocks,
    make_metadata,
    make_options,
    make_rows,
    store_tokens,
)
from pagedkv.plugin.decoder import DecoderShape  # noqa: E402
from pagedkv.plugin.errors import PagedKVError  # noqa: E402
from pagedkv.plugin.interface import KVStorage  # noqa: E402
from pagedkv.plugin.kv_dtypes import (  # noqa: E402
    BF16,
    KV_DTYPE_OF_TORCH,
    KVDtype,
    ScaleGranularity,
    find_kv_dtype,
    known_kv_dtypes,
)
from pagedkv.plugin.model_spec import AttentionSpec  # noqa: E402

BLOCK_SIZE = 16
LAYER = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
"""What is measured: a layer of an 8B Llama."""
BATCH_SIZES = (1, 4, 16, 64, 128)
CONTEXT_LENS = (1024, 4096, 16384, 65536)
PROMPTS = ((1, 1024), (1, 4096), (1, 16384), (8, 2048))
"""Number of sequences, tokens of each."""
LENGTHS = ((0, 1), (15, 1), (16, 1), (83, 1), (3000, 1), (0, 2), (0, 147), (31, 133), (1000, 16))
"""num_cached_tokens and num_new_tokens of the rows of each check."""
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 100},
    "softcap": {"softcap": 20.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "all": {"sliding_window": 100, "softcap": 20.0, "has_sinks": True, "has_alibi": True},
}
_TOKEN = ScaleGranularity.TOKEN


@dataclass(frozen=True, slots=True)
class Case:
    """One layer whose values are checked."""

    spec: AttentionSpec
    kv_dtype: KVDtype
    dtype: torch.dtype
    name: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks and measures the triton kernels on this machine's GPU.")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the figures go (default: gpu.json)")
    json_path = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        print("no GPU: torch sees none on this machine, so there is nothing to measure", file=sys.stderr)
        return 2
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        kernels = TritonKernels.create(device)
    except PagedKVError as error:
        print(error, file=sys.stderr)
        return 2
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    print(f"{report['device']}, torch {torch.__version__}")
    report["correctness"] = check_values(kernels, device, list(cases()))
    report["copy_bytes_per_s"] = copy_bandwidth(device)
    print(f"\ncopy: {report['copy_bytes_per_s'] / 1e9:.0f} GB/s")
    report["decode"] = list(measure_decodes(kernels, device, report["copy_bytes_per_s"]))
    report["prefill"] = list(measure_prefills(kernels, device))
    report["steps"] = list(report_steps(kernels, device))
    report["run_s"] = round(time.monotonic() - started, 1)
    json_path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{report['run_s']} s, written to {json_path}")
    is_right = not report["correctness"]["failures"] and all(step["is_right"] for step in report["steps"])
    return 0 if is_right else 1


def kv_dtypes() -> list[KVDtype]:
    """The registered ones, and the 8-bit ones with a scale per token and head that the kernels also serve."""
    known = [find_kv_dtype(name) for name in known_kv_dtypes()]
    eight_bits = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return known + [
        KVDtype(name, 8, storage, key_scales=_TOKEN, value_scales=_TOKEN)
        for name, storage in eight_bits.items()
        if name not in known_kv_dtypes()
    ]


# Correctness


def cases() -> Iterator[Case]:
    """Head sizes, group sizes, features and KV dtypes, each varied from one plain layer."""
    for dtype in (torch.float16, torch.bfloat16):
        own = KV_DTYPE_OF_TORCH[dtype]
        for head_dim, group in ((32, 1), (64, 3), (80, 4), (96, 2), (128, 7), (128, 16), (256, 32)):
            spec = AttentionSpec(2 * group, 2, head_dim, head_dim)
            yield Case(spec, own, dtype, f"head_dim {head_dim}, {group} heads a KV head")
        for name, features in FEATURES.items():
            yield Case(AttentionSpec(8, 2, 64, 64, **features), own, dtype, name)
        yield Case(AttentionSpec(8, 2, 128, 64), own, dtype, "narrow values")
        for kv_dtype in kv_dtypes():
            if kv_dtype.is_quantized:
                yield Case(AttentionSpec(8, 2, 128, 128), kv_dtype, dtype, "plain")


def check_values(kernels: TritonKernels, device: torch.device, all_cases: Sequence[Case]) -> dict[str, Any]:
    """Prints and counts the cases whose largest error is over twice torch's own and one unit in the last place."""
    failures, refused = [], []
    for case in all_cases:
        name = f"{str(case.dtype).removeprefix('torch.')}, {case.kv_dtype.name}, {case.name}"
        reasons = kernels.unsupported_reasons(case.spec, case.spec.cache_spec(BLOCK_SIZE, case.kv_dtype), case.dtype)
        if reasons:
            refused.append(f"{name}: {'; '.join(reasons)}")
            continue
        error, bound = _error_and_bound(kernels, device, case)
        if not error <= bound:
            failures.append(f"{name}: error {error:.2e}, allowed {bound:.2e}")
    print(f"values: {len(all_cases) - len(failures) - len(refused)} of {len(all_cases)} layers right")
    for line in failures:
        print(f"  WRONG   {line}")
    for line in refused:
        print(f"  refused {line}")
    return {"num_cases": len(all_cases), "failures": failures, "refused": refused}


def _error_and_bound(kernels: TritonKernels, device: torch.device, case: Case) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    spec, num_blocks = case.spec, count_blocks(LENGTHS, BLOCK_SIZE)
    storage = _with_static_scales(kernels.allocate(spec.cache_spec(BLOCK_SIZE, case.kv_dtype), num_blocks))
    rows = make_rows(LENGTHS, BLOCK_SIZE, num_blocks, generator)
    num_queries = [row.num_queries for row in rows]
    num_stored = sum(row.seq_len for row in rows)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, case.dtype)
        for shape in (
            (sum(num_queries), spec.num_heads, spec.head_dim),
            (num_stored, spec.num_kv_heads, spec.head_dim),
            (num_stored, spec.num_kv_heads, spec.v_head_dim),
        )
    )
    store_tokens(kernels, storage, rows, k, v)
    options = make_options(spec, device, generator)
    out = kernels.attend(q, storage, make_metadata(rows, BLOCK_SIZE, device), options)
    exact, as_torch = [], []
    for row, row_q in zip(rows, q.split(num_queries), strict=True):
        row_k, row_v = kernels.read(storage, row.slots(BLOCK_SIZE).to(device))
        exact.append(attend_exactly(row_q, row_k, row_v, options))
        as_torch.append(attend_as_torch(row_q, row_k, row_v, options, case.dtype))
    expected = torch.cat(exact)
    error, torch_error = (float((x.double() - expected).abs().max()) for x in (out, torch.cat(as_torch)))
    return error, 2 * torch_error + torch.finfo(case.dtype).eps * float(expected.abs().max())


def _with_static_scales(storage: KVStorage) -> KVStorage:
    """Scales that hold numbers up to 6, for KV dtypes that take theirs from outside."""
    dtype = storage.spec.kv_dtype
    if ScaleGranularity.STATIC not in (dtype.key_scales, dtype.value_scales):
        return storage
    largest = torch.finfo(dtype.storage).max if dtype.storage.is_floating_point else 127.0
    scales = torch.full((storage.spec.num_kv_heads,), 6.0 / largest, device=storage.tensors["k"].device)
    return replace(storage, static_scales=(scales, scales))


# Speed


def median_s(work: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median time on the device, replayed from a graph so that Python's time is not in it, with a cold L2 cache."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(2**28, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 4 GiB or a quarter of what is free."""
    num_bytes = min(2**32, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device)


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    kv_dtype: str
    batch_size: int
    context_len: int
    time_us: float
    bytes_per_s: float
    fraction_of_copy: float


def measure_decodes(kernels: TritonKernels, device: torch.device, copy_bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """Every KV dtype that keeps or quantizes bfloat16, with blocks in random order; sizes that fit the memory."""
    print(f"\n{'decode':>10} {'batch':>6} {'context':>8} {'us':>9} {'GB/s':>7} {'of copy':>8}")
    for kv_dtype in kv_dtypes():
        cache_spec = LAYER.cache_spec(BLOCK_SIZE, kv_dtype)
        if (kv_dtype != BF16 and not kv_dtype.is_quantized) or kernels.unsupported_reasons(
            LAYER, cache_spec, torch.bfloat16
        ):
            continue
        for batch_size, context_len in product(BATCH_SIZES, CONTEXT_LENS):
            num_blocks = batch_size * context_len // BLOCK_SIZE
            num_bytes = num_blocks * cache_spec.bytes_per_block
            torch.cuda.empty_cache()
            if num_bytes + 2**30 > torch.cuda.mem_get_info(device)[0]:
                print(f"{kv_dtype.name:>10} {batch_size:>6} {context_len:>8} does not fit")
                continue
            storage = _with_static_scales(kernels.allocate(cache_spec, num_blocks))
            seconds = _decode_s(kernels, storage, batch_size, context_len, device)
            rate = num_bytes / seconds
            figure = DecodeFigure(kv_dtype.name, batch_size, context_len, seconds * 1e6, rate, rate / copy_bytes_per_s)
            print(
                f"{kv_dtype.name:>10} {batch_size:>6} {context_len:>8} {figure.time_us:>9.1f} "
                f"{rate / 1e9:>7.0f} {figure.fraction_of_copy:>8.2f}"
            )
            yield asdict(figure)


def _decode_s(
    kernels: TritonKernels, storage: KVStorage, batch_size: int, context_len: int, device: torch.device
) -> float:
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(batch_size + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch_size,), context_len, dtype=torch.int32, device=device),
        block_table=torch.randperm(storage.num_blocks, device=device).int().view(batch_size, -1),
        slot_mapping=torch.full((batch_size,), -1, device=device),
        max_query_len=1,
        max_seq_len=context_len,
        num_decodes=batch_size,
    )
    q = torch.randn(batch_size, LAYER.num_heads, LAYER.head_dim, dtype=torch.bfloat16, device=device)
    options = AttentionOptions(scale=LAYER.head_dim**-0.5)
    return median_s(lambda: kernels.attend(q, storage, metadata, options), device)


def measure_prefills(kernels: TritonKernels, device: torch.device) -> Iterator[dict[str, Any]]:
    """Whole prompts in bfloat16 from the cache, beside torch's attention on the same tokens, contiguous."""
    print(f"\n{'prefill':>10} {'tokens':>8} {'TFLOP/s':>9} {'torch':>9}")
    for num_sequences, num_tokens in PROMPTS:
        flops = 4 * LAYER.num_heads * LAYER.head_dim * num_sequences * num_tokens * (num_tokens + 1) / 2
        ours, torchs = (flops / seconds for seconds in _prefill_s(kernels, num_sequences, num_tokens, device))
        print(f"{num_sequences:>10} {num_tokens:>8} {ours / 1e12:>9.0f} {torchs / 1e12:>9.0f}")
        yield {
            "num_sequences": num_sequences,
            "num_tokens": num_tokens,
            "flops_per_s": ours,
            "torch_flops_per_s": torchs,
        }


def _prefill_s(
    kernels: TritonKernels, num_sequences: int, num_tokens: int, device: torch.device
) -> tuple[float, float]:
    """Our time, and torch's."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(0, num_tokens)] * num_sequences
    num_blocks = count_blocks(lengths, BLOCK_SIZE)
    rows = make_rows(lengths, BLOCK_SIZE, num_blocks, generator)
    storage = kernels.allocate(LAYER.cache_spec(BLOCK_SIZE, BF16), num_blocks)
    q, k, v = (
        torch.randn(num_sequences * num_tokens, heads, LAYER.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (LAYER.num_heads, LAYER.num_kv_heads, LAYER.num_kv_heads)
    )
    store_tokens(kernels, storage, rows, k, v)
    metadata, options = make_metadata(rows, BLOCK_SIZE, device), AttentionOptions(scale=LAYER.head_dim**-0.5)
    group = LAYER.num_heads // LAYER.num_kv_heads
    heads_first = [
        x.view(num_sequences, num_tokens, -1, LAYER.head_dim).transpose(1, 2).contiguous()
        for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    ]
    return (
        median_s(lambda: kernels.attend(q, storage, metadata, options), device),
        median_s(
            lambda: torch.nn.functional.scaled_dot_product_attention(
                heads_first[0], heads_first[1], heads_first[2], is_causal=True
            ),
            device,
        ),
    )


def report_steps(
    kernels: TritonKernels,
    device: torch.device,
    shape: DecoderShape = DEMO_SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    **sizes: Any,
) -> Iterator[dict[str, Any]]:
    """Decode steps without and with graphs; `sizes` are those of `measure_steps`."""
    weights = make_decoder_weights(shape, dtype, device, max_positions=8192)
    decoder = TritonDecoderKernels.create(device).build(weights)
    print(f"\n{'step':>10} {'context':>8} {'ms':>9} {'by graph':>9} {'saved':>7}")
    for figure in measure_steps(decoder, kernels, shape, dtype, device, **sizes):
        print(
            f"{figure.batch_size:>10} {figure.context_len:>8} {figure.eager_ms:>9.2f} {figure.graph_ms:>9.2f} "
            f"{figure.saved_share:>7.0%}{'' if figure.is_right else f'  WRONG by {figure.error:.1e}'}"
        )
        yield {**asdict(figure), "saved_share": figure.saved_share, "is_right": figure.is_right}


if __name__ == "__main__":
    sys.exit(main())
