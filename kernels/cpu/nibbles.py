"""int4 in the `cpu` kernels' layout, which csrc/nibbles.h explains: two neighbours along the sum share a byte.

k: [num_blocks, num_kv_heads, head_dim / 2, block_size]     channels 2i and 2i + 1 of a token
v: [num_blocks, num_kv_heads, block_size / 2, v_head_dim]   tokens 2i and 2i + 1, rotated
k_first: [num_blocks, num_kv_heads, head_dim / 4]           two more bits of each channel of the first token
k_scale, k_zero: [num_blocks, num_kv_heads, head_dim]       v_scale, v_zero: [..., num_groups, block_size]
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagedkv.kernels.quantization import FIRST_KEY_BITS, dequantize_groups, rotate, unpack
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import INT4, SCALE_CODES_PER_OCTAVE, KVCacheSpec, KVDtype


def are_supported_nibbles(kv_dtype: KVDtype) -> bool:
    """Whether a KV dtype equals int4, apart from its name."""
    return kv_dtype.bits == INT4.bits and replace(kv_dtype, name=INT4.name) == INT4


def list_nibble_tensors(spec: KVCacheSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape of a block and dtype of each tensor."""
    size, dim, v_dim, heads = spec.block_size, spec.head_dim, spec.v_head_dim, spec.num_kv_heads
    num_groups = -(-v_dim // spec.kv_dtype.group_size)
    return {
        "k": ((heads, dim // 2, size), torch.uint8),
        "v": ((heads, size // 2, v_dim), torch.uint8),
        "k_first": ((heads, dim * FIRST_KEY_BITS // 8), torch.uint8),
        "k_scale": ((heads, dim), torch.int8),
        "k_zero": ((heads, dim), torch.int8),
        "v_scale": ((heads, num_groups, size), torch.int8),
        "v_zero": ((heads, num_groups, size), torch.int8),
    }


def read_nibbles(storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads slots: [N]. Returns k: [N, num_kv_heads, head_dim] and v, with v_head_dim, float32."""
    spec, tensors = storage.spec, storage.tensors
    blocks, offsets = slots // spec.block_size, slots % spec.block_size
    elements = unpack(tensors["k"][blocks, :, :, offsets], 4, spec.head_dim).float()
    first = unpack(tensors["k_first"][blocks], FIRST_KEY_BITS, spec.head_dim) / 2**FIRST_KEY_BITS
    elements += first * (offsets == 0)[:, None, None]
    keys = (elements + tensors["k_zero"][blocks]) * (tensors["k_scale"][blocks] / SCALE_CODES_PER_OCTAVE).exp2()
    pairs = tensors["v"][blocks, :, offsets // 2]
    values = torch.where((offsets % 2 == 0)[:, None, None], pairs & 15, pairs >> 4)
    codes, zeros = (tensors[name][blocks, :, :, offsets] for name in ("v_scale", "v_zero"))
    return keys, rotate(dequantize_groups(values, codes, zeros, spec.kv_dtype.group_size))
