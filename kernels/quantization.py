"""Quantizes numbers to elements, scales and zero points in plain torch; the reference for all kernels.

8 bits, with a scale per token and head (or static): number = element × scale. The scale maps the token's largest
magnitude exactly to an element. For 8-bit floats several scales do this; the one with the smallest squared error over
the token is used.

4 bits: number = (element + zero) × 2^(code / 8) with element 0 to 15, and one code and zero point, both int8, for each
group of numbers: a channel's keys over the tokens of a block, or up to 64 channels of one token's values. Of eight
scales around range / 15 the one with the smallest squared error is used. Keys of a block's first token have two more
bits, quarters of a step: number = (element + quarters / 4 + zero) × 2^(code / 8). Values are rotated before.

When tokens are added to an incomplete block of keys, the whole block is quantized again, from the stored values of its
old tokens. A channel keeps its scale as long as its range fits, and only changes its zero point, which is exact.
Otherwise all its elements are rounded again, by at most half of the new step. Tokens stored together are rounded once.
On keys of SmolLM2 a block filled token by token has 1.5 × the squared error of one that is stored at once.
"""

from __future__ import annotations

import math

import torch

from pagedkv.plugin.kv_dtypes import SCALE_CODES_PER_OCTAVE, KVDtype

_SMALLEST_ABSMAX = 1e-30
"""Lower limit of a row's magnitude. It keeps the inverse of a scale finite: a row of zeros is stored as zeros."""
_MAX_ELEMENT = 15
_CODE_CANDIDATES = range(4, -4, -1)
"""Scale codes tried, relative to the one that fits the range."""
_MAX_ZERO = 112
"""Largest magnitude of a zero point if the range fits. int8 leaves space for finer candidates and 15 steps above it."""
FIRST_KEY_BITS = 2
"""Additional bits for the keys of a block's first token."""
_SUBSTEPS = 2**FIRST_KEY_BITS
_MAX_NUMBER = 2.0**21
"""Magnitude at which 4-bit numbers saturate: the coarsest scale × the largest zero point."""


def quantize_tokens(x: torch.Tensor, kv_dtype: KVDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows with one scale each.

    Args:
        x: [..., dim], floating point.

    Returns:
        elements: [..., dim] of `kv_dtype.storage`; scales: [...] float32. A row with a NaN or Inf has such a scale.
    """
    x = x.float()
    absmax = x.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_ABSMAX)
    largest, *others = _exact_elements(kv_dtype)
    scales = absmax / largest
    if others:
        errors = _squared_error(x, scales, kv_dtype)
        for element in others:
            candidates = absmax / element
            candidate_errors = _squared_error(x, candidates, kv_dtype)
            is_better = candidate_errors < errors
            scales = torch.where(is_better, candidates, scales)
            errors = torch.where(is_better, candidate_errors, errors)
    return round_to_elements(x / scales, kv_dtype), scales.squeeze(-1)


def round_to_elements(x: torch.Tensor, kv_dtype: KVDtype) -> torch.Tensor:
    """Rounds to the nearest 8-bit elements of `kv_dtype.storage`. Saturates out of range; NaN becomes 0 in int8."""
    x = x.clamp(-kv_dtype.max_element, kv_dtype.max_element)
    if kv_dtype.storage.is_floating_point:
        return x.to(kv_dtype.storage)
    return x.nan_to_num(0.0).round().to(kv_dtype.storage)


def _exact_elements(kv_dtype: KVDtype) -> list[float]:
    """Elements to which a row's largest magnitude may be mapped: the largest; for floats also those in its octave."""
    if not kv_dtype.storage.is_floating_point:
        return [kv_dtype.max_element]
    power = 2.0 ** math.floor(math.log2(kv_dtype.max_element))
    step = power * torch.finfo(kv_dtype.storage).eps
    return [kv_dtype.max_element - index * step for index in range(round((kv_dtype.max_element - power) / step) + 1)]


def _squared_error(x: torch.Tensor, scales: torch.Tensor, kv_dtype: KVDtype) -> torch.Tensor:
    return (round_to_elements(x / scales, kv_dtype).float() * scales - x).square().sum(-1, keepdim=True)


def quantize_groups(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes rows to 4 bits with a scale and a zero point per `group_size` channels; the last group may be shorter.

    Args:
        x: [..., dim], floating point.

    Returns:
        elements: [..., dim] uint8 of 0 to 15; codes and zeros: [..., num_groups] int8.
    """
    dim = x.shape[-1]
    width = min(group_size, dim)
    # Pad the last group with one of its numbers, so that its range does not grow.
    filling = x[..., -1:].expand(*x.shape[:-1], -dim % width)
    grouped = torch.cat([x, filling], -1).unflatten(-1, (-1, width))
    is_real = (torch.arange(grouped.shape[-2] * width, device=x.device) < dim).view(-1, width)
    elements, codes, zeros = _quantize_affine(grouped.float(), -1, is_real)
    return elements.to(torch.uint8).flatten(-2)[..., :dim], codes.squeeze(-1), zeros.squeeze(-1)


def dequantize_groups(
    elements: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Inverse of `quantize_groups`. Returns [..., dim] float32."""
    dim = elements.shape[-1]
    zeros, scales = (x.repeat_interleave(group_size, -1)[..., :dim] for x in (zeros.float(), _scales(codes.float())))
    return (elements.float() + zeros) * scales


def quantize_channels(
    x: torch.Tensor, num_known: torch.Tensor, codes: torch.Tensor, is_continued: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes blocks to 4 bits (6 for the first token) with a scale and a zero point for each channel of a block.

    Args:
        x: [num_blocks, block_size, num_heads, dim] float32: the tokens stored before, dequantized, and the new ones.
        num_known: [num_blocks] int64, 1 or more: number of valid tokens; the others are ignored.
        codes: [num_blocks, num_heads, dim] int8: codes of the tokens stored before.
        is_continued: [num_blocks] bool: whether tokens were stored before; if not, `codes` is ignored.

    Returns:
        elements: as x, uint8 of 0 to 15; quarters: [num_blocks, num_heads, dim] uint8 of 0 to 3, of the first tokens;
        codes and zeros: [num_blocks, num_heads, dim] int8.
    """
    places = torch.arange(x.shape[1], device=x.device)
    is_known = (places < num_known[:, None])[:, :, None, None]
    substeps = torch.where(places == 0, _SUBSTEPS, 1)[:, None, None]
    lowest = torch.finfo(torch.float32).min
    least_codes = torch.where(is_continued[:, None, None], codes.float(), lowest)[:, None]
    known = torch.where(is_known, x, x[:, :1])
    numbers, codes, zeros = _quantize_affine(known, 1, is_known, least_codes, substeps)
    elements = numbers.floor()
    quarters = (numbers[:, 0] - elements[:, 0]) * _SUBSTEPS
    return elements.to(torch.uint8), quarters.to(torch.uint8), codes.squeeze(1), zeros.squeeze(1)


def dequantize_channels(
    elements: torch.Tensor, quarters: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Inverse of `quantize_channels`, with any leading dims. Returns [..., block_size, num_heads, dim] float32."""
    numbers = elements.float()
    numbers[..., 0, :, :] += quarters.float() / _SUBSTEPS
    return (numbers + zeros.float().unsqueeze(-3)) * _scales(codes.float()).unsqueeze(-3)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiplies rows by an orthonormal Hadamard matrix, which is its own inverse: [..., dim], as float32.

    This spreads outliers of a row over the whole row. If dim is not a power of two, the matrix has blocks of the
    largest one that divides it. It adds and subtracts pairs, so that a row's result does not depend on other rows.
    """
    dim = x.shape[-1]
    size = dim & -dim
    x, width = x.float(), 1
    while width < size:
        low, high = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        width *= 2
    return x * size**-0.5


def pack(elements: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 elements of 2 or 4 bits into bytes, the first lowest: [..., dim] to [..., ceil(dim × bits / 8)]."""
    per_byte = 8 // bits
    padding = elements.new_zeros(*elements.shape[:-1], -elements.shape[-1] % per_byte)
    parts = torch.cat([elements, padding], -1).unflatten(-1, (-1, per_byte)).unbind(-1)
    packed = parts[0].clone()
    for place, part in enumerate(parts):
        packed |= part << (bits * place)
    return packed


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Inverse of `pack`: [..., ceil(dim × bits / 8)] to [..., dim]."""
    parts = [(packed >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.stack(parts, -1).flatten(-2)[..., :dim]


def _quantize_affine(
    x: torch.Tensor,
    dim: int,
    weights: torch.Tensor | None = None,
    least_codes: torch.Tensor | None = None,
    substeps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns elements, as floats, codes and zeros, with one code and zero along `dim`, which is kept.

    Args:
        weights: of the squared errors; None weighs all equally.
        least_codes: float32; smallest codes that count as fitting the range.
        substeps: number of parts of a step to which elements are rounded; None rounds to whole steps.
    """
    x = x.nan_to_num(0.0).clamp(-_MAX_NUMBER, _MAX_NUMBER)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    fitting_scales = torch.maximum((high - low) / _MAX_ELEMENT, torch.maximum(low.abs(), high.abs()) / _MAX_ZERO)
    fitting_codes = (fitting_scales.log2() * SCALE_CODES_PER_OCTAVE).ceil()
    if least_codes is not None:
        fitting_codes = fitting_codes.maximum(least_codes)
    best_errors, best_codes = torch.full_like(low, torch.inf), torch.zeros_like(low)
    for candidate in _CODE_CANDIDATES:
        codes = (fitting_codes + candidate).clamp(-128, 127)
        elements, zeros = _round_affine(x, low, codes, substeps)
        errors = ((elements + zeros) * _scales(codes) - x).square()
        errors = (errors if weights is None else errors * weights).sum(dim, keepdim=True)
        is_better = errors < best_errors
        best_errors = torch.where(is_better, errors, best_errors)
        best_codes = torch.where(is_better, codes, best_codes)
    elements, zeros = _round_affine(x, low, best_codes, substeps)
    return elements, best_codes.to(torch.int8), zeros.to(torch.int8)


def _round_affine(
    x: torch.Tensor, low: torch.Tensor, codes: torch.Tensor, substeps: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns elements and zero points, as floats, for x with minimum `low` and the scales of `codes`."""
    scales = _scales(codes)
    zeros = (low / scales).round().clamp(-128, 127)
    if substeps is None:
        return ((x / scales).round() - zeros).clamp(0, _MAX_ELEMENT), zeros
    elements = (x / scales * substeps).round() / substeps - zeros
    return elements.clamp(min=0).minimum(_MAX_ELEMENT + 1 - 1 / substeps), zeros


def _scales(codes: torch.Tensor) -> torch.Tensor:
    return (codes / SCALE_CODES_PER_OCTAVE).exp2()
