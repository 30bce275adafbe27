"""Layout of a layer's blocks in memory, and the kernel arguments that describe it.

    k: [num_blocks, num_kv_heads, block_size, head_dim]      one head of one block is one contiguous piece
    v: [num_blocks, num_kv_heads, block_size, v_head_dim]
    k_scale, v_scale: [num_blocks, num_kv_heads, block_size] float32, with a scale per token and head

With 4 bits, two elements in a byte, scales and zero points are int8 and those of keys for a whole block:

    k_scale, k_zero: [num_blocks, num_kv_heads, head_dim]
    v_scale, v_zero: [num_blocks, num_kv_heads, block_size, num_groups]
    k_first: [num_blocks, num_kv_heads, head_dim / 4] two bits more of the first token, four in a byte

A token's row number counts these rows of one head: all offsets, of elements and of scales, follow from it. It is 64
bits wide: a pool holds more than 2³¹ elements.

>>> num_kv_heads, block_size, slot, head = 3, 16, 37, 1  # slot 37 is block 2, offset 5
>>> (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
117
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton

from pagedkv.kernels.quantization import FIRST_KEY_BITS, dequantize_groups, rotate, unpack
from pagedkv.kernels.triton.formats import ElementFormat, element_format, is_int4, scales_constant
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import SCALE_CODES_PER_OCTAVE, KVCacheSpec, ScaleGranularity


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVStorage:
    """Allocates zeroed blocks of one layer. Raises torch.OutOfMemoryError."""
    dtype = spec.kv_dtype
    rows = (num_blocks, spec.num_kv_heads, spec.block_size)
    tensors = {
        name: torch.zeros(*rows, dim * dtype.bits // (8 * dtype.storage.itemsize), dtype=dtype.storage, device=device)
        for name, dim in (("k", spec.head_dim), ("v", spec.v_head_dim))
    }
    if is_int4(dtype):
        heads = (num_blocks, spec.num_kv_heads)
        num_groups = -(-spec.v_head_dim // dtype.group_size)
        for name in ("scale", "zero"):
            tensors[f"k_{name}"] = torch.zeros(*heads, spec.head_dim, dtype=torch.int8, device=device)
            tensors[f"v_{name}"] = torch.zeros(*rows, num_groups, dtype=torch.int8, device=device)
        num_first_bytes = spec.head_dim * FIRST_KEY_BITS // 8
        tensors["k_first"] = torch.zeros(*heads, num_first_bytes, dtype=torch.uint8, device=device)
    for name, granularity in (("k_scale", dtype.key_scales), ("v_scale", dtype.value_scales)):
        if granularity is ScaleGranularity.TOKEN:
            tensors[name] = torch.zeros(rows, dtype=dtype.scale_dtype, device=device)
    return KVStorage(spec, num_blocks, tensors)


@dataclass(frozen=True)
class CacheArguments:
    """The arguments of a launch that depend only on the storage."""

    storage: KVStorage

    @property
    def spec(self) -> KVCacheSpec:
        return self.storage.spec

    @property
    def widest_dim(self) -> int:
        """Width of a tile's rows, a power of two."""
        return int(triton.next_power_of_2(max(self.spec.head_dim, self.spec.v_head_dim)))

    @cached_property
    def format(self) -> ElementFormat:
        return element_format(self.spec.kv_dtype)

    @property
    def pointers(self) -> Mapping[str, torch.Tensor | None]:
        """Tensors by argument name. Raises ConfigError if the KV dtype needs static scales and the storage has none."""
        return {
            "k_cache_ptr": self.storage.tensors["k"].view(self.format.view),
            "v_cache_ptr": self.storage.tensors["v"].view(self.format.view),
            "k_scale_ptr": self._scales("k_scale", self.spec.kv_dtype.key_scales, 0),
            "v_scale_ptr": self._scales("v_scale", self.spec.kv_dtype.value_scales, 1),
            "k_zero_ptr": self.storage.tensors.get("k_zero"),
            "v_zero_ptr": self.storage.tensors.get("v_zero"),
            "k_first_ptr": self.storage.tensors.get("k_first"),
        }

    @property
    def constants(self) -> Mapping[str, Any]:
        dtype = self.spec.kv_dtype
        return {
            "NUM_KV_HEADS": self.spec.num_kv_heads,
            "BLOCK_SIZE": self.spec.block_size,
            "HEAD_DIM": self.spec.head_dim,
            "V_HEAD_DIM": self.spec.v_head_dim,
            "HEAD_DIM_PAD": triton.next_power_of_2(self.spec.head_dim),
            "V_HEAD_DIM_PAD": triton.next_power_of_2(self.spec.v_head_dim),
            "FORMAT": self.format.name,
            "K_SCALES": scales_constant(dtype.key_scales),
            "V_SCALES": scales_constant(dtype.value_scales),
        }

    def _scales(self, name: str, granularity: ScaleGranularity, place: int) -> torch.Tensor | None:
        if granularity is not ScaleGranularity.STATIC:
            return self.storage.tensors.get(name)
        if self.storage.static_scales is None:
            raise ConfigError(f"the KV dtype {self.spec.kv_dtype.name} needs static scales, and this layer has none")
        return self.storage.static_scales[place]


def read_slots(storage: KVStorage, slots: torch.Tensor, name: str) -> torch.Tensor:
    """Reads slots: [N] int64. Returns [N, num_kv_heads, dim] float32; `name` is "k" or "v"."""
    spec = storage.spec
    if is_int4(spec.kv_dtype):
        return _read_int4_keys(storage, slots) if name == "k" else _read_int4_values(storage, slots)
    blocks, offsets = slots // spec.block_size, slots % spec.block_size
    elements = storage.tensors[name]
    # Index bytes: indexing is not implemented for every 8-bit float.
    view = element_format(spec.kv_dtype).view
    numbers = elements.view(view)[blocks, :, offsets].view(elements.dtype).float()
    scales = storage.tensors.get(f"{name}_scale")
    if scales is not None:
        return numbers * scales[blocks, :, offsets, None].float()
    static = CacheArguments(storage).pointers[f"{name}_scale_ptr"]
    return numbers if static is None else numbers * static[:, None]


def _read_int4_keys(storage: KVStorage, slots: torch.Tensor) -> torch.Tensor:
    spec, tensors = storage.spec, storage.tensors
    blocks, offsets = slots // spec.block_size, slots % spec.block_size
    numbers = unpack(tensors["k"][blocks, :, offsets], 4, spec.head_dim).float()
    parts = unpack(tensors["k_first"][blocks], FIRST_KEY_BITS, spec.head_dim) / 2**FIRST_KEY_BITS
    numbers += torch.where((offsets == 0)[:, None, None], parts, 0.0)
    scales = (tensors["k_scale"][blocks].float() / SCALE_CODES_PER_OCTAVE).exp2()
    return (numbers + tensors["k_zero"][blocks].float()) * scales


def _read_int4_values(storage: KVStorage, slots: torch.Tensor) -> torch.Tensor:
    spec = storage.spec
    blocks, offsets = slots // spec.block_size, slots % spec.block_size
    packed, codes, zeros = (storage.tensors[name][blocks, :, offsets] for name in ("v", "v_scale", "v_zero"))
    elements = unpack(packed, 4, spec.v_head_dim)
    return rotate(dequantize_groups(elements, codes, zeros, spec.kv_dtype.group_size))
