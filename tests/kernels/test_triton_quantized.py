"""Elements of 8 bits in the triton kernels: every byte, every kind of scale, and both ways to convert 8-bit floats.

Without a GPU these tests are run by `test_triton_interpreter.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton.provider import TritonKernels, is_interpreted
from pagedkv.kernels.triton.tuning import INTERPRETER, device_architecture
from pagedkv.plugin.conformance.attention_oracle import (
    Row,
    attend_as_torch,
    attend_exactly,
    count_blocks,
    make_metadata,
    make_options,
    make_rows,
    store_tokens,
)
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import FP16, KVDtype, ScaleGranularity
from pagedkv.plugin.model_spec import AttentionSpec

pytestmark = pytest.mark.skipif(
    not is_interpreted() and not torch.cuda.is_available(),
    reason="run by test_triton_interpreter.py, in its own process",
)

DEVICE = torch.device("cpu") if is_interpreted() else torch.device("cuda", 0)
TOKEN, STATIC = ScaleGranularity.TOKEN, ScaleGranularity.STATIC
INT8 = KVDtype("int8", 8, torch.int8, key_scales=TOKEN, value_scales=TOKEN)
E4M3 = replace(INT8, name="e4m3", storage=torch.float8_e4m3fn)
E5M2 = replace(INT8, name="e5m2", storage=torch.float8_e5m2)
INT8_STATIC = replace(INT8, name="int8_static", key_scales=STATIC, value_scales=STATIC)
E4M3_STATIC = replace(E4M3, name="e4m3_static", key_scales=STATIC, value_scales=STATIC)
MIXED = replace(INT8, name="int8_static_keys", key_scales=STATIC)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64)
LENGTHS = [(0, 1), (70, 1), (0, 40), (30, 5)]

every_kv_dtype = pytest.mark.parametrize(
    ("kv_dtype", "has_fp8_conversion"),
    [
        pytest.param(kv_dtype, by_instruction, id=f"{kv_dtype.name}{' by instruction' * by_instruction}")
        for kv_dtype in (INT8, E4M3, E5M2, INT8_STATIC, E4M3_STATIC, MIXED)
        for by_instruction in ((False, True) if kv_dtype is E4M3 else (False,))
    ],
)


@pytest.fixture
def has_fp8_conversion() -> bool:
    """Whether E4M3 is converted by instruction or by bits."""
    return False


@pytest.fixture
def kernels(has_fp8_conversion: bool) -> TritonKernels:
    architecture = INTERPRETER if is_interpreted() else device_architecture(DEVICE)
    if has_fp8_conversion and not is_interpreted() and not architecture.has_fp8_conversion:
        pytest.skip("this GPU has no such instruction")
    return TritonKernels(DEVICE, replace(architecture, has_fp8_conversion=has_fp8_conversion))


def _allocate(kernels: TritonKernels, spec: AttentionSpec, kv_dtype: KVDtype, num_blocks: int) -> KVStorage:
    """With other static scales for each head, keys and values, that hold numbers up to 6."""
    cache_spec = spec.cache_spec(16, kv_dtype)
    assert kernels.unsupported_reasons(spec, cache_spec, torch.float16) == []
    largest = 127.0 if kv_dtype.storage is torch.int8 else torch.finfo(kv_dtype.storage).max
    heads = torch.arange(spec.num_kv_heads, device=DEVICE)
    return replace(
        kernels.allocate(cache_spec, num_blocks), static_scales=((6.0 + heads) / largest, (7.0 + heads) / largest)
    )


def _error_over_torchs(kernels: TritonKernels, kv_dtype: KVDtype, magnitude: float) -> float:
    """Largest error against what is stored, over the bound that the conformance suite allows."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = count_blocks(LENGTHS, 16)
    storage = _allocate(kernels, SPEC, kv_dtype, num_blocks)
    rows = make_rows(LENGTHS, 16, num_blocks, generator)
    q = torch.randn(sum(row.num_queries for row in rows), 4, 64, generator=generator).to(DEVICE, torch.float16)
    k, v = (torch.randn(2, sum(row.seq_len for row in rows), 2, 64, generator=generator) * magnitude).to(DEVICE)
    store_tokens(kernels, storage, rows, k, v)
    options = make_options(SPEC, DEVICE, generator)
    out = kernels.attend(q, storage, make_metadata(rows, 16, DEVICE), options)
    exact, as_torch = [], []
    for row, row_q in zip(rows, q.split([row.num_queries for row in rows]), strict=True):
        row_k, row_v = kernels.read(storage, row.slots(16).to(DEVICE))
        exact.append(attend_exactly(row_q, row_k, row_v, options))
        as_torch.append(attend_as_torch(row_q, row_k, row_v, options, torch.float16))
    expected = torch.cat(exact)
    error, torch_error = (float((x.double() - expected).abs().max()) for x in (out, torch.cat(as_torch)))
    return error / (2 * torch_error + torch.finfo(torch.float16).eps * float(expected.abs().max()))


@every_kv_dtype
def test_attention_over_what_is_stored(kernels: TritonKernels, kv_dtype: KVDtype) -> None:
    assert _error_over_torchs(kernels, kv_dtype, 1.0) <= 1


def test_values_whose_scale_no_float16_holds(kernels: TritonKernels) -> None:
    """Values near 0.002 have an E5M2 scale of about 1e-7."""
    assert _error_over_torchs(kernels, E5M2, 2e-3) <= 1


@every_kv_dtype
def test_stored_numbers_are_the_nearest(kernels: TritonKernels, has_fp8_conversion: bool, kv_dtype: KVDtype) -> None:
    if is_interpreted() and has_fp8_conversion:
        pytest.skip("the interpreter loses the carry into the exponent when it rounds to E4M3")
    storage = _allocate(kernels, SPEC, kv_dtype, 2)
    row = Row(0, 20, torch.tensor([1, 0]))
    x = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[3] = 0
    x[4, 1, 5] = 1e-20
    store_tokens(kernels, storage, [row], x, x)
    granularities = (kv_dtype.key_scales, kv_dtype.value_scales)
    numbers = kernels.read(storage, row.slots(16).to(DEVICE))
    for read, static_scale, granularity in zip(numbers, storage.static_scales, granularities, strict=True):
        if granularity is TOKEN:
            largest = 127.0 if kv_dtype.storage is torch.int8 else torch.finfo(kv_dtype.storage).max
            scale = x.abs().amax(-1, keepdim=True) / largest
        else:
            scale = static_scale[:, None]
        if kv_dtype.storage is torch.int8:
            allowed = scale / 2 * torch.ones_like(x)
        else:
            limits = torch.finfo(kv_dtype.storage)
            allowed = torch.maximum(x.abs() * limits.eps, scale * limits.smallest_normal * limits.eps) / 2
        # By bits, numbers are rounded to float16 first, which moves one just off the middle into it.
        assert ((read - x).abs() <= allowed * 1.02 + 1e-12).all()


@pytest.mark.parametrize(
    ("storage_dtype", "has_fp8_conversion"),
    [(torch.int8, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False)],
)
def test_every_byte_comes_out_as_torch_reads_it(kernels: TritonKernels, storage_dtype: torch.dtype) -> None:
    """The output of a sequence of one token is its value; all bytes that are numbers are one token of 256 dims."""
    kv_dtype = KVDtype("any", 8, storage_dtype, key_scales=STATIC, value_scales=STATIC)
    spec = AttentionSpec(1, 1, 32, 256)
    ones = torch.ones(1, device=DEVICE)
    storage = replace(_allocate(kernels, spec, kv_dtype, 1), static_scales=(ones, ones))
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(storage_dtype)
    is_number = stored.float().isfinite()
    storage.tensors["v"][0, 0, 0].view(torch.uint8).copy_(stored.view(torch.uint8).where(is_number, 0))
    metadata = make_metadata([Row(0, 1, torch.tensor([0]))], 16, DEVICE)
    q = torch.ones(1, 1, 32, dtype=torch.float16, device=DEVICE)
    out = kernels.attend(q, storage, metadata, make_options(spec, DEVICE, torch.Generator()))
    assert torch.equal(out[0, 0], stored.half().where(is_number, 0))


def test_out_of_range_saturates_under_static_scales(kernels: TritonKernels) -> None:
    for kv_dtype in (INT8_STATIC, E4M3_STATIC):
        storage = _allocate(kernels, SPEC, kv_dtype, 1)
        x = torch.full((1, 2, 64), 1000.0, device=DEVICE)
        store_tokens(kernels, storage, [Row(0, 1, torch.tensor([0]))], x, -x)
        k, v = kernels.read(storage, torch.zeros(1, dtype=torch.int64, device=DEVICE))
        torch.testing.assert_close(k, torch.tensor([6.0, 7.0], device=DEVICE)[None, :, None].expand_as(k))
        torch.testing.assert_close(v, -torch.tensor([7.0, 8.0], device=DEVICE)[None, :, None].expand_as(v))


def test_missing_static_scales_are_an_error(kernels: TritonKernels) -> None:
    storage = replace(_allocate(kernels, SPEC, E4M3_STATIC, 1), static_scales=None)
    x = torch.zeros(1, 2, 64, device=DEVICE)
    with pytest.raises(ConfigError, match="e4m3_static needs static scales"):
        store_tokens(kernels, storage, [Row(0, 1, torch.tensor([0]))], x, x)


@pytest.mark.parametrize(
    ("kv_dtype", "reason"),
    [
        (KVDtype("int4", 4, torch.uint8, key_scales=ScaleGranularity.CHANNEL, value_scales=TOKEN), "no 4-bit elements"),
        (replace(INT8, key_scales=ScaleGranularity.CHANNEL), "no scales per channel for keys"),
        (replace(INT8, value_scales=ScaleGranularity.NONE), "values need scales"),
        (replace(FP16, name="scaled", key_scales=TOKEN), "keys take no scales"),
    ],
    ids=["4 bits", "channels", "no scale", "needless scale"],
)
def test_other_kv_dtypes_are_refused_with_the_reason(kernels: TritonKernels, kv_dtype: KVDtype, reason: str) -> None:
    reasons = kernels.unsupported_reasons(SPEC, SPEC.cache_spec(16, kv_dtype), torch.float16)
    assert any(reason in line for line in reasons), reasons
