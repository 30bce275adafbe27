"""KV dtypes: how keys and values lie in a block, and the bytes this takes. The one place that counts them.

The planner, the memory budget and the kernels that allocate all ask `KVCacheSpec.bytes_per_block`; a test holds every
kernel provider to it.

>>> spec = KVCacheSpec(num_kv_heads=3, head_dim=64, v_head_dim=64, block_size=16, kv_dtype=find_kv_dtype("bf16"))
>>> spec.bytes_per_block  # 3 heads × 16 tokens × (64 + 64) elements × 2 bytes
12288
>>> spec.bytes_per_token
768.0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from pagedkv.plugin.errors import ConfigError, PluginError


class ScaleGranularity(Enum):
    """What one scale covers."""

    NONE = "none"
    """No scale: the elements are the values."""
    STATIC = "static"
    """One scale a head, outside the blocks, from a file or the checkpoint."""
    TOKEN = "token"
    """One scale for each token and head."""
    TOKEN_GROUP = "token_group"
    """One scale for each group of `group_size` channels of each token and head."""
    CHANNEL = "channel"
    """One scale for each channel and head of a block."""


@dataclass(frozen=True, slots=True)
class KVDtype:
    """A KV dtype. Elements of `bits` bits are packed densely along the head dimension."""

    name: str
    bits: int
    storage: torch.dtype
    """Dtype of the tensors that hold the elements; uint8 where several are packed into a byte."""
    is_signed: bool = True
    key_scales: ScaleGranularity = ScaleGranularity.NONE
    value_scales: ScaleGranularity = ScaleGranularity.NONE
    scale_dtype: torch.dtype = torch.float32
    group_size: int = 0
    """Channels that share a scale, for `TOKEN_GROUP`; a head_dim below it is one group."""

    @property
    def is_quantized(self) -> bool:
        return self.key_scales is not ScaleGranularity.NONE or self.value_scales is not ScaleGranularity.NONE

    def num_scales(self, granularity: ScaleGranularity, head_dim: int, block_size: int) -> int:
        """Scales inside one block for one head of keys or of values."""
        match granularity:
            case ScaleGranularity.TOKEN:
                return block_size
            case ScaleGranularity.TOKEN_GROUP:
                return block_size * -(-head_dim // self.group_size)
            case ScaleGranularity.CHANNEL:
                return head_dim
            case _:
                return 0


_KV_DTYPES: dict[str, KVDtype] = {}


def register_kv_dtype(kv_dtype: KVDtype) -> KVDtype:
    """Makes a KV dtype known by its name.

    Raises:
        PluginError: another dtype has this name.
    """
    known = _KV_DTYPES.setdefault(kv_dtype.name, kv_dtype)
    if known != kv_dtype:
        raise PluginError(f"the KV dtype {kv_dtype.name!r} is registered twice, with different properties")
    return kv_dtype


def find_kv_dtype(name: str) -> KVDtype:
    """Raises ConfigError, listing the known names, when there is none of this name."""
    try:
        return _KV_DTYPES[name]
    except KeyError:
        raise ConfigError(f"unknown KV dtype {name!r}; known: {', '.join(known_kv_dtypes())}") from None


def known_kv_dtypes() -> list[str]:
    return sorted(_KV_DTYPES)


FP32 = register_kv_dtype(KVDtype("fp32", 32, torch.float32))
FP16 = register_kv_dtype(KVDtype("fp16", 16, torch.float16))
BF16 = register_kv_dtype(KVDtype("bf16", 16, torch.bfloat16))

KV_DTYPE_OF_TORCH = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}
"""What `auto` means: the KV dtype that keeps a model's own dtype."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Storage of one attention layer's keys and values on one shard."""

    num_kv_heads: int
    """Heads on this shard."""
    head_dim: int
    """Of the keys."""
    v_head_dim: int
    block_size: int
    """Tokens a block."""
    kv_dtype: KVDtype

    @property
    def bytes_per_block(self) -> int:
        """Elements, scales and padding of one block in this layer."""
        dtype = self.kv_dtype
        elements = sum(-(-dim * dtype.bits // 8) for dim in (self.head_dim, self.v_head_dim)) * self.block_size
        num_scales = dtype.num_scales(dtype.key_scales, self.head_dim, self.block_size)
        num_scales += dtype.num_scales(dtype.value_scales, self.v_head_dim, self.block_size)
        return self.num_kv_heads * (elements + num_scales * dtype.scale_dtype.itemsize)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size
