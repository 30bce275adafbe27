"""Converts elements of each KV dtype to numbers inside a kernel, and numbers to elements.

8-bit floats are passed to kernels as bytes. sm_89 and newer convert E4M3 in hardware. On other GPUs its bits are moved
into a float16, whose exponent is one bit wider and biased by 15 instead of 7, so that the value is too small by 2⁸,
also for subnormals. E5M2 is the upper half of a float16 without change (Micikevicius et al., "FP8 Formats for
Deep Learning", 2022).

>>> import torch
>>> bits = torch.tensor([3.5]).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
>>> (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16) * 256
tensor([3.5000], dtype=torch.float16)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.plugin.kv_dtypes import INT4, KVDtype, ScaleGranularity

NO_SCALES: Final = tl.constexpr(0)
STATIC_SCALES: Final = tl.constexpr(1)
TOKEN_SCALES: Final = tl.constexpr(2)
CHANNEL_SCALES: Final = tl.constexpr(3)
GROUP_SCALES: Final = tl.constexpr(4)

_SCALES = {
    ScaleGranularity.NONE: NO_SCALES.value,
    ScaleGranularity.STATIC: STATIC_SCALES.value,
    ScaleGranularity.TOKEN: TOKEN_SCALES.value,
    ScaleGranularity.CHANNEL: CHANNEL_SCALES.value,
    ScaleGranularity.TOKEN_GROUP: GROUP_SCALES.value,
}
_SMALLEST_ABSMAX = tl.constexpr(1e-30)
"""Lower limit of a row's magnitude. It keeps the inverse of a scale finite: a row of zeros is stored as zeros."""


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """Compile-time facts about a KV dtype's elements, for kernels."""

    name: str
    max_value: float
    """Largest magnitude of an element; 0 for elements that are the values themselves."""
    view: torch.dtype
    """Dtype under which the storage's tensors are passed to a kernel."""


_INT4 = ElementFormat("int4", 0.0, torch.uint8)
"""Format of int4. `int4.py` handles its zero points and parts of steps."""


_FORMATS = {
    torch.float32: ElementFormat("float", 0.0, torch.float32),
    torch.float16: ElementFormat("float", 0.0, torch.float16),
    torch.bfloat16: ElementFormat("float", 0.0, torch.bfloat16),
    torch.int8: ElementFormat("int8", 127.0, torch.int8),
    torch.float8_e4m3fn: ElementFormat("e4m3", 448.0, torch.uint8),
    torch.float8_e5m2: ElementFormat("e5m2", 57344.0, torch.uint8),
}


def element_format(kv_dtype: KVDtype) -> ElementFormat:
    """The format of a KV dtype for which `unsupported_format_reasons` is empty."""
    return _INT4 if is_int4(kv_dtype) else _FORMATS[kv_dtype.storage]


def is_int4(kv_dtype: KVDtype) -> bool:
    """Whether a KV dtype has the 4-bit format, under any name."""
    return replace(kv_dtype, name=INT4.name) == INT4


def scales_constant(granularity: ScaleGranularity) -> int:
    """The kernels' number for a supported granularity."""
    return int(_SCALES[granularity])


def unsupported_format_reasons(kv_dtype: KVDtype) -> list[str]:
    """Returns the reasons why the kernels can't store a KV dtype; empty if they can."""
    if is_int4(kv_dtype):
        return []
    known = _FORMATS.get(kv_dtype.storage)
    if known is None or kv_dtype.bits != kv_dtype.storage.itemsize * 8:
        return [f"the triton kernels have no {kv_dtype.bits}-bit elements in {kv_dtype.storage} ({kv_dtype.name})"]
    if kv_dtype.first_key_bits or kv_dtype.has_rotated_values:
        return [f"the triton kernels neither rotate values nor give first keys more bits ({kv_dtype.name})"]
    of_bytes = (ScaleGranularity.NONE, ScaleGranularity.STATIC, ScaleGranularity.TOKEN)
    granularities = {"keys": kv_dtype.key_scales, "values": kv_dtype.value_scales}
    reasons = [
        f"the triton kernels have no scales per {granularity.value} for {what} ({kv_dtype.name})"
        for what, granularity in granularities.items()
        if granularity not in of_bytes
    ]
    needs_scales = known.max_value > 0
    reasons += [
        f"{kv_dtype.storage} {what} {'need' if needs_scales else 'take no'} scales in the triton kernels"
        for what, granularity in granularities.items()
        if (granularity is ScaleGranularity.NONE) == needs_scales
    ]
    return reasons


@triton.jit
def decode_elements(x, FORMAT: tl.constexpr, HAS_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Converts loaded elements to numbers of DTYPE, without scales. Exact unless they are floats wider than DTYPE."""
    if FORMAT == "e4m3":
        if HAS_FP8:
            half = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = x.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        numbers = half.to(DTYPE)
    elif FORMAT == "e5m2":
        numbers = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        numbers = x.to(DTYPE)
    return numbers


@triton.jit
def encode_elements(x, FORMAT: tl.constexpr, MAX_VALUE: tl.constexpr, HAS_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Converts float32 numbers, divided by their scale, to the nearest elements. Saturates out of range."""
    if FORMAT == "float":
        elements = x.to(DTYPE)
    else:
        x = tl.minimum(tl.maximum(x, -MAX_VALUE), MAX_VALUE)
        if FORMAT == "int8":
            elements = tl.floor(x + 0.5).to(tl.int8)
        elif FORMAT == "e5m2":
            elements = _drop_half_bits(x.to(tl.float16), 8)
        elif HAS_FP8:
            elements = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            elements = _drop_half_bits((x * 0.00390625).to(tl.float16), 7)
    return elements


@triton.jit
def _drop_half_bits(half, NUM_BITS: tl.constexpr):
    """Drops NUM_BITS low bits of a float16, rounded to nearest even. Returns sign and magnitude as a byte."""
    bits = half.to(tl.uint16, bitcast=True)
    magnitude = bits & 0x7FFF
    is_odd = (magnitude >> NUM_BITS) & 1
    rounded = (magnitude + ((1 << (NUM_BITS - 1)) - 1) + is_odd) >> NUM_BITS
    return (((bits >> 8) & 0x80) | rounded).to(tl.uint8)


@triton.jit
def token_scales(x, MAX_VALUE: tl.constexpr):
    """Returns one scale for each row of x: [tokens, dims] float32, which maps its largest magnitude to MAX_VALUE."""
    return tl.maximum(tl.max(tl.abs(x), axis=1), _SMALLEST_ABSMAX) / MAX_VALUE
