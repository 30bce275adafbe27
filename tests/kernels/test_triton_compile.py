"""Every kernel compiles, ahead of time and without a GPU, for every architecture of the tuning table.

What is compiled is what the provider launches: the same plans, made for tensors without memory. The report
(`pytest -s`) says registers, spilled bytes and shared memory of each. No decode kernel spills, none needs more shared
memory than the architecture has. The kernels of a decoder, which hold a row in registers, don't spill either.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedkv.kernels.triton.attention import plan_attention
from pagedkv.kernels.triton.copy import plan_copy
from pagedkv.kernels.triton.decode import plan_decode
from pagedkv.kernels.triton.fused import MAX_HIDDEN_SIZE, plan_add_norm, plan_embed, plan_gate, plan_rotary
from pagedkv.kernels.triton.launch import Launch
from pagedkv.kernels.triton.layout import CacheArguments, allocate_storage
from pagedkv.kernels.triton.provider import is_interpreted
from pagedkv.kernels.triton.store import plan_store
from pagedkv.kernels.triton.store_int4 import plan_rotate, plan_store_int4
from pagedkv.kernels.triton.tuning import Architecture, amd_architecture, nvidia_architecture
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.conformance.decoder import CASES, Case, make_shape, make_weights
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.kv_dtypes import BF16, FP16, FP32, INT4, KVDtype, ScaleGranularity
from pagedkv.plugin.model_spec import AttentionSpec

pytestmark = pytest.mark.skipif(is_interpreted(), reason="the interpreter takes the compiler's place")

META = torch.device("meta")
TOKEN, STATIC = ScaleGranularity.TOKEN, ScaleGranularity.STATIC
INT8 = KVDtype("int8", 8, torch.int8, key_scales=TOKEN, value_scales=TOKEN)
INT8_STATIC = replace(INT8, name="int8_static", key_scales=STATIC, value_scales=STATIC)
E4M3 = replace(INT8, name="e4m3", storage=torch.float8_e4m3fn)
E4M3_STATIC = replace(E4M3, name="e4m3_static", key_scales=STATIC, value_scales=STATIC)
E5M2 = replace(INT8, name="e5m2", storage=torch.float8_e5m2)


@dataclass(frozen=True)
class Target:
    name: str
    gpu: GPUTarget
    architecture: Architecture
    max_shared_bytes: int


TARGETS = [
    # sm_80 itself has 163 KiB; sm_86, sm_89 and sm_120, which share its tiles, have 99.
    Target("sm_80", GPUTarget("cuda", 80, 32), nvidia_architecture(80, 108), 99 * 1024),
    Target("sm_90", GPUTarget("cuda", 90, 32), nvidia_architecture(90, 132), 227 * 1024),
    Target("sm_100", GPUTarget("cuda", 100, 32), nvidia_architecture(100, 148), 227 * 1024),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), amd_architecture("gfx942", 304), 64 * 1024),
]
TARGET_CASES = [
    pytest.param(target, id=target.name, marks=[] if target.name == "sm_90" else pytest.mark.slow) for target in TARGETS
]


@dataclass(frozen=True)
class Variant:
    """A model's layer as it is served."""

    name: str
    q_dtype: torch.dtype
    kv_dtype: KVDtype
    spec: AttentionSpec
    kernels: tuple[str, ...]


def _spec(head_dim: int, **features: Any) -> AttentionSpec:
    return AttentionSpec(8, 2, head_dim, head_dim, **features)


ALL_FEATURES = {"sliding_window": 4096, "softcap": 50.0, "has_sinks": True, "has_alibi": True}
STORE_INT4 = ("_store_keys_kernel", "_store_values_kernel", "_rotate_kernel")
ALL_KERNELS = ("_store_kernel", "_decode_kernel", "_reduce_kernel", "_attention_kernel", "_copy_kernel", *STORE_INT4)
ATTENTION = ("_decode_kernel", "_attention_kernel")
DECODE = ("_decode_kernel", "_reduce_kernel")
COVERING = [
    Variant("bf16-64", torch.bfloat16, BF16, _spec(64), ALL_KERNELS),
    Variant("bf16-128-all-features", torch.bfloat16, BF16, _spec(128, **ALL_FEATURES), ALL_KERNELS[1:4]),
    Variant("bf16-256", torch.bfloat16, BF16, _spec(256), ALL_KERNELS[1:4]),
    Variant("fp16-80", torch.float16, FP16, _spec(80), ("_store_kernel", "_decode_kernel")),
    Variant("e5m2-64", torch.bfloat16, E5M2, _spec(64), ("_decode_kernel",)),
    Variant("e4m3-128", torch.bfloat16, E4M3, _spec(128), ("_store_kernel", "_decode_kernel", "_attention_kernel")),
    Variant("int8-static-256", torch.float16, INT8_STATIC, _spec(256), ALL_KERNELS[:3]),
    Variant("int4-64", torch.bfloat16, INT4, _spec(64), (*STORE_INT4, *ALL_KERNELS[1:4])),
    Variant("int4-128-all-features", torch.bfloat16, INT4, _spec(128, **ALL_FEATURES), ATTENTION),
    Variant("int4-256", torch.float16, INT4, _spec(256), (*STORE_INT4, *ATTENTION)),
    Variant("fp32-256", torch.float32, FP32, _spec(256), ATTENTION),
]
"""Each line of the tuning tables but for narrower float32, each format, each feature."""
EVERYTHING = [
    Variant(f"{kv_dtype.name}-{dim}-{len(features)}-features", dtype, kv_dtype, _spec(dim, **features), ALL_KERNELS)
    for kv_dtype, dtype in (
        (BF16, torch.bfloat16), (FP16, torch.float16), (FP32, torch.float32), (INT8, torch.bfloat16),
        (INT8_STATIC, torch.float16), (E4M3, torch.float16), (E4M3_STATIC, torch.bfloat16), (E5M2, torch.bfloat16),
        (INT4, torch.bfloat16),
    )
    for dim in (32, 64, 80, 96, 128, 256)
    for features in ({}, ALL_FEATURES)
]  # fmt: skip
VARIANTS = EVERYTHING if os.environ.get("PAGEDKV_COMPILE_EVERYTHING") == "1" else COVERING
"""Everything takes half an hour of a core."""


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("target", TARGET_CASES)
def test_compiles_within_the_limits(target: Target, variant: Variant) -> None:
    for launch in _launches(variant, target.architecture):
        if launch.kernel.__name__ in variant.kernels:
            usage = _compile(launch, target)
            print(f"{target.name:7} {variant.name:22} {usage}")
            assert usage.shared_bytes <= target.max_shared_bytes, usage
            assert usage.spilled_bytes == 0 or usage.kernel not in DECODE, usage


DECODERS = [
    (torch.bfloat16, Case("llama", make_shape(hidden=4096, ffn=14336, head_dim=128))),
    (torch.bfloat16, replace(CASES[3], name="qwen3-half", has_output_norms=True, rotated_share=0.5)),
    (torch.float16, Case("widest", make_shape(hidden=MAX_HIDDEN_SIZE, head_dim=256, activation="gelu_tanh"))),
    (torch.float32, Case("no positions", make_shape(activation="gelu"), has_head_norms=True, rotated_share=0.0)),
]
"""Each of the fused kernels' branches."""


@pytest.mark.parametrize(("dtype", "case"), DECODERS, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize("target", TARGET_CASES)
def test_a_decoders_kernels_compile_without_spills(target: Target, dtype: torch.dtype, case: Case) -> None:
    for launch in _decoder_launches(dtype, case):
        usage = _compile(launch, target)
        print(f"{target.name:7} {case.name:22} {usage}")
        assert usage.shared_bytes <= target.max_shared_bytes, usage
        assert usage.spilled_bytes == 0, usage


def _decoder_launches(dtype: torch.dtype, case: Case) -> Iterator[Launch]:
    """All that a step of one layer launches, the first and the last one's."""
    shape, spec = case.shape, case.shape.attention
    narrow = replace(case, shape=replace(shape, hidden_size=8, intermediate_size=8, vocab_size=8, num_layers=1))
    layer = make_weights(narrow, dtype).layers[0]
    batch = ModelInput(*(torch.empty(5, dtype=torch.int64, device=META) for _ in range(3)))
    x, residual = (torch.empty(5, shape.hidden_size, dtype=kind, device=META) for kind in (dtype, torch.float32))
    norm = residual[0]
    x_norm = norm if case.has_output_norms else None
    yield plan_embed(x, batch.token_ids, residual, norm, x, shape)
    yield plan_add_norm(residual, x, x_norm, norm, x, shape, residual)
    yield plan_add_norm(residual, x, x_norm, norm, x, shape, residual, batch.logit_rows)
    yield plan_add_norm(residual, x, x_norm, norm, x, shape, None)
    qkv = torch.empty(5, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, dtype=dtype, device=META)
    yield plan_rotary(qkv, batch, layer, shape)
    gate_up = torch.empty(5, 2 * shape.intermediate_size, dtype=dtype, device=META)
    yield plan_gate(gate_up, gate_up[:, : shape.intermediate_size], shape.activation)


def _launches(variant: Variant, architecture: Architecture) -> Iterator[Launch]:
    """All that a step of decodes and prompts launches."""
    spec = variant.spec
    cache_spec = spec.cache_spec(16, variant.kv_dtype)
    scales = torch.empty(spec.num_kv_heads, device=META)
    storage = replace(allocate_storage(cache_spec, 64, META), static_scales=(scales, scales))
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.empty(7, dtype=torch.int32, device=META),
        seq_lens=torch.empty(6, dtype=torch.int32, device=META),
        block_table=torch.empty(6, 30, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(105, dtype=torch.int64, device=META),
        max_query_len=100,
        max_seq_len=400,
        num_decodes=5,
    )
    q = torch.empty(105, spec.num_heads, spec.head_dim, dtype=variant.q_dtype, device=META)
    k, v = q[:, : spec.num_kv_heads], q[:, : spec.num_kv_heads, : spec.v_head_dim]
    is_rotated = variant.kv_dtype.has_rotated_values
    out_dtype = torch.float32 if is_rotated else variant.q_dtype
    out = torch.empty(105, spec.num_heads, spec.v_head_dim, dtype=out_dtype, device=META)
    heads = torch.empty(spec.num_heads, device=META)
    options = AttentionOptions(
        scale=0.125,
        sliding_window=spec.sliding_window,
        softcap=spec.softcap,
        sinks=heads if spec.has_sinks else None,
        alibi_slopes=heads if spec.has_alibi else None,
    )
    cache = CacheArguments(storage)
    if is_rotated:
        yield from plan_store_int4(cache, k, v, metadata)
        yield plan_rotate(out, out.to(variant.q_dtype))
    else:
        yield plan_store(cache, k, v, metadata, architecture)
    yield from plan_decode(out, q, cache, metadata, options, architecture)
    yield plan_attention(out, q, cache, metadata, options, architecture, first_row=5)
    yield plan_copy(storage.tensors["k"], torch.empty(3, 2, dtype=torch.int64, device=META))


@dataclass(frozen=True)
class Usage:
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def _compile(launch: Launch, target: Target) -> Usage:
    compiled = triton.compile(_source(launch), target=target.gpu, options=launch.compile_options)
    name = launch.kernel.__name__
    if target.gpu.backend == "cuda":
        registers, spilled = _cuda_usage(compiled.asm["cubin"])
    else:
        registers, spilled = _amd_usage(compiled.asm["amdgcn"])
    return Usage(name, registers, spilled, compiled.metadata.shared)


def _source(launch: Launch) -> ASTSource:
    """As triton's launcher specializes: absent pointers and ones are constants, multiples of 16 are known as such."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        is_constant = parameter.is_constexpr or value is None or is_one
        signature[parameter.name] = "constexpr" if is_constant else _type_name(value)
        if is_constant:
            constants[(place,)] = value
        elif _is_aligned(value) and not parameter.do_not_specialize:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        names = {
            torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
            torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
        }  # fmt: skip
        return f"*{names[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of a thread's stack, which the kernels use for nothing but spilled registers."""
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [binaries / "cuobjdump", "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return int(re.search(r"REG:(\d+)", listing)[1]), int(re.search(r"STACK:(\d+)", listing)[1])


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers, and bytes of a lane's vector registers that were spilled."""
    registers, spilled = (
        int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return registers, 4 * spilled
