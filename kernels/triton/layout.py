"""How a layer's blocks lie in memory, and the arguments that tell every kernel so.

    k: [num_blocks, num_kv_heads, block_size, head_dim]      one head of one block is one contiguous piece
    v: [num_blocks, num_kv_heads, block_size, v_head_dim]
    k_scale, v_scale: [num_blocks, num_kv_heads, block_size] float32, with a scale per token and head

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

from pagedkv.kernels.triton.formats import ElementFormat, element_format, scales_constant
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec, ScaleGranularity


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVStorage:
    """Zeroed blocks of one layer. Raises torch.OutOfMemoryError."""
    dtype = spec.kv_dtype
    rows = (num_blocks, spec.num_kv_heads, spec.block_size)
    tensors = {
        "k": torch.zeros(*rows, spec.head_dim, dtype=dtype.storage, device=device),
        "v": torch.zeros(*rows, spec.v_head_dim, dtype=dtype.storage, device=device),
    }
    for name, granularity in (("k_scale", dtype.key_scales), ("v_scale", dtype.value_scales)):
        if granularity is ScaleGranularity.TOKEN:
            tensors[name] = torch.zeros(rows, dtype=dtype.scale_dtype, device=device)
    return KVStorage(spec, num_blocks, tensors)


@dataclass(frozen=True)
class CacheArguments:
    """The part of a launch that depends on the storage alone."""

    storage: KVStorage

    @property
    def spec(self) -> KVCacheSpec:
        return self.storage.spec

    @property
    def widest_dim(self) -> int:
        """Of a tile's rows, which are powers of two wide."""
        return int(triton.next_power_of_2(max(self.spec.head_dim, self.spec.v_head_dim)))

    @cached_property
    def format(self) -> ElementFormat:
        return element_format(self.spec.kv_dtype)

    @property
    def pointers(self) -> Mapping[str, torch.Tensor | None]:
        """Raises ConfigError where the KV dtype has static scales and the storage brings none."""
        return {
            "k_cache_ptr": self.storage.tensors["k"].view(self.format.view),
            "v_cache_ptr": self.storage.tensors["v"].view(self.format.view),
            "k_scale_ptr": self._scales("k_scale", self.spec.kv_dtype.key_scales, 0),
            "v_scale_ptr": self._scales("v_scale", self.spec.kv_dtype.value_scales, 1),
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
    """Numbers stored at slots: [N] int64, as [N, num_kv_heads, dim] float32; `name` is "k" or "v"."""
    spec = storage.spec
    blocks, offsets = slots // spec.block_size, slots % spec.block_size
    elements = storage.tensors[name]
    # Indexing is not implemented for every 8-bit float, reading their bytes is.
    view = element_format(spec.kv_dtype).view
    numbers = elements.view(view)[blocks, :, offsets].view(elements.dtype).float()
    scales = storage.tensors.get(f"{name}_scale")
    if scales is not None:
        return numbers * scales[blocks, :, offsets, None].float()
    static = CacheArguments(storage).pointers[f"{name}_scale_ptr"]
    return numbers if static is None else numbers * static[:, None]
