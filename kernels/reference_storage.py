"""Layout of the `reference` kernels' blocks in memory; writes and reads them for each granularity of scales.

k: [num_blocks, block_size, num_kv_heads, head_dim]        v: with v_head_dim; two elements of 4 bits in a byte
k_first: [num_blocks, num_kv_heads, head_dim / 4], with scales per channel: four times two bits more, of the first token
k_scale, v_scale, k_zero, v_zero, where the KV dtype has them inside its blocks:
    per token:   [num_blocks, block_size, num_kv_heads]
    per group:   [num_blocks, block_size, num_kv_heads, num_groups]
    per channel: [num_blocks, num_kv_heads, head_dim]
"""

from __future__ import annotations

import torch

from pagedkv.kernels.quantization import (
    FIRST_KEY_BITS,
    dequantize_channels,
    dequantize_groups,
    pack,
    quantize_channels,
    quantize_groups,
    quantize_tokens,
    rotate,
    round_to_elements,
    unpack,
)
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVCacheSpec, KVDtype, ScaleGranularity

_BYTE_STORAGE = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_PLACES = {"k": 0, "v": 1}
"""Index of each side's scales in `KVStorage.static_scales`."""


def unsupported_format_reasons(kv_dtype: KVDtype) -> list[str]:
    """Returns the reasons why blocks of a KV dtype can't be written; empty if they can."""
    if kv_dtype in KV_DTYPE_OF_TORCH.values():
        return []
    granularities = {kv_dtype.key_scales, kv_dtype.value_scales}
    whole_bytes = granularities <= {ScaleGranularity.TOKEN, ScaleGranularity.STATIC}
    half_bytes = granularities <= {ScaleGranularity.CHANNEL, ScaleGranularity.TOKEN_GROUP}
    first_key_bits = FIRST_KEY_BITS if kv_dtype.key_scales is ScaleGranularity.CHANNEL else 0
    if kv_dtype.first_key_bits != first_key_bits:
        return [f"the KV dtype {kv_dtype.name} is not implemented"]
    if whole_bytes and kv_dtype.storage in _BYTE_STORAGE and kv_dtype.zero_dtype is None:
        return []
    if half_bytes and kv_dtype.bits == 4 and kv_dtype.scale_dtype == kv_dtype.zero_dtype == torch.int8:
        return []
    return [f"the KV dtype {kv_dtype.name} is not implemented"]


def allocate_blocks(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVStorage:
    """Allocates zeroed blocks of one layer. Raises torch.OutOfMemoryError."""
    tensors = {}
    for name, dim, granularity in _sides(spec):
        rows = (num_blocks, spec.block_size, spec.num_kv_heads)
        bytes_per_row = -(-dim * spec.kv_dtype.bits // 8)
        num_elements = bytes_per_row // spec.kv_dtype.storage.itemsize
        tensors[name] = torch.zeros(*rows, num_elements, dtype=spec.kv_dtype.storage, device=device)
        shape = _scales_shape(spec, num_blocks, dim, granularity)
        if shape is not None:
            tensors[f"{name}_scale"] = torch.zeros(shape, dtype=spec.kv_dtype.scale_dtype, device=device)
            if spec.kv_dtype.zero_dtype is not None:
                tensors[f"{name}_zero"] = torch.zeros(shape, dtype=spec.kv_dtype.zero_dtype, device=device)
    if spec.kv_dtype.first_key_bits:
        shape = (num_blocks, spec.num_kv_heads, -(-spec.head_dim * FIRST_KEY_BITS // 8))
        tensors["k_first"] = torch.zeros(shape, dtype=torch.uint8, device=device)
    return KVStorage(spec, num_blocks, tensors)


def store_slots(storage: KVStorage, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k: [N, num_kv_heads, head_dim] and v, with v_head_dim, to slots: [N] int64, quantized."""
    if not len(slots):
        return
    if storage.spec.kv_dtype.has_rotated_values:
        v = rotate(v)
    for (name, _, granularity), x in zip(_sides(storage.spec), (k, v), strict=True):
        match granularity:
            case ScaleGranularity.CHANNEL:
                _store_channels(storage, name, slots, x)
            case ScaleGranularity.TOKEN_GROUP:
                elements, codes, zeros = quantize_groups(x, storage.spec.kv_dtype.group_size)
                _write(storage, name, slots, pack(elements, 4))
                _write(storage, f"{name}_scale", slots, codes)
                _write(storage, f"{name}_zero", slots, zeros)
            case ScaleGranularity.TOKEN:
                elements, scales = quantize_tokens(x, storage.spec.kv_dtype)
                _write(storage, name, slots, elements)
                _write(storage, f"{name}_scale", slots, scales)
            case ScaleGranularity.STATIC:
                scaled = x.float() / _static_scales(storage, name)[:, None]
                _write(storage, name, slots, round_to_elements(scaled, storage.spec.kv_dtype))
            case ScaleGranularity.NONE:
                _write(storage, name, slots, x.to(storage.spec.kv_dtype.storage))


def load_blocks(storage: KVStorage, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads blocks: [...] int64, as k: [..., block_size, num_kv_heads, head_dim] and v, with v_head_dim.

    In float32, except unquantized KV dtypes, which keep theirs. Values stored rotated are not rotated back.
    """
    k, v = (_load_side(storage, blocks, *side) for side in _sides(storage.spec))
    return k, v


def _sides(spec: KVCacheSpec) -> tuple[tuple[str, int, ScaleGranularity], ...]:
    """Name of the tensor, head size and granularity of keys and of values."""
    dtype = spec.kv_dtype
    return ("k", spec.head_dim, dtype.key_scales), ("v", spec.v_head_dim, dtype.value_scales)


def _scales_shape(
    spec: KVCacheSpec, num_blocks: int, dim: int, granularity: ScaleGranularity
) -> tuple[int, ...] | None:
    match granularity:
        case ScaleGranularity.TOKEN:
            return (num_blocks, spec.block_size, spec.num_kv_heads)
        case ScaleGranularity.TOKEN_GROUP:
            return (num_blocks, spec.block_size, spec.num_kv_heads, -(-dim // spec.kv_dtype.group_size))
        case ScaleGranularity.CHANNEL:
            return (num_blocks, spec.num_kv_heads, dim)
        case _:
            return None


def _load_side(
    storage: KVStorage, blocks: torch.Tensor, name: str, dim: int, granularity: ScaleGranularity
) -> torch.Tensor:
    elements = _bytes_of(storage.tensors[name])[blocks].view(storage.tensors[name].dtype)
    match granularity:
        case ScaleGranularity.CHANNEL:
            first, codes, zeros = (storage.tensors[f"{name}_{part}"][blocks] for part in ("first", "scale", "zero"))
            return dequantize_channels(unpack(elements, 4, dim), unpack(first, FIRST_KEY_BITS, dim), codes, zeros)
        case ScaleGranularity.TOKEN_GROUP:
            codes, zeros = (storage.tensors[f"{name}_{part}"][blocks] for part in ("scale", "zero"))
            return dequantize_groups(unpack(elements, 4, dim), codes, zeros, storage.spec.kv_dtype.group_size)
        case ScaleGranularity.TOKEN:
            return elements.float() * storage.tensors[f"{name}_scale"][blocks].unsqueeze(-1)
        case ScaleGranularity.STATIC:
            return elements.float() * _static_scales(storage, name)[:, None]
        case _:
            return elements


def _store_channels(storage: KVStorage, name: str, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Quantizes the blocks of new tokens again, from their stored tokens and the new ones."""
    block_size = storage.spec.block_size
    blocks, places = torch.unique(slots // block_size, return_inverse=True)
    offsets = slots % block_size
    bounds = torch.zeros(len(blocks), dtype=torch.int64, device=slots.device)
    first_new = bounds.scatter_reduce(0, places, offsets, "amin", include_self=False)
    last_new = bounds.scatter_reduce(0, places, offsets, "amax", include_self=False)
    dim = storage.spec.head_dim
    numbers = _load_side(storage, blocks, name, dim, ScaleGranularity.CHANNEL)
    numbers[places, offsets] = x.float()
    codes = storage.tensors[f"{name}_scale"]
    elements, first, new_codes, zeros = quantize_channels(numbers, last_new + 1, codes[blocks], first_new > 0)
    storage.tensors[name][blocks] = pack(elements, 4)
    storage.tensors[f"{name}_first"][blocks] = pack(first, FIRST_KEY_BITS)
    codes[blocks] = new_codes
    storage.tensors[f"{name}_zero"][blocks] = zeros


def _write(storage: KVStorage, name: str, slots: torch.Tensor, rows: torch.Tensor) -> None:
    target = _bytes_of(storage.tensors[name]).flatten(0, 1)
    target.index_copy_(0, slots, _bytes_of(rows))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Views 8-bit floats as bytes: torch can index them only on some devices."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _static_scales(storage: KVStorage, name: str) -> torch.Tensor:
    """Returns static scales, [num_kv_heads] float32. Raises ConfigError if the storage has none."""
    if storage.static_scales is None:
        raise ConfigError(f"the KV dtype {storage.spec.kv_dtype.name} needs static scales, and this layer has none")
    return storage.static_scales[_PLACES[name]]
