"""KV dtypes: how keys and values are stored in a block, and how many bytes that takes.

Planner, memory budget and kernels all use `KVCacheSpec.bytes_per_block`; a test checks it for all our kernels.

>>> spec = KVCacheSpec(num_kv_heads=3, head_dim=64, v_head_dim=64, block_size=16, kv_dtype=find_kv_dtype("bf16"))
>>> spec.bytes_per_block  # 3 heads × 16 tokens × (64 + 64) elements × 2 bytes
12288
>>> spec.bytes_per_token
768.0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points

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
    """A KV dtype. Elements of `bits` bits are packed densely along the head dimension.

    A number is element × scale, or (element + zero point) × scale if there are zero points.
    """

    name: str
    bits: int
    storage: torch.dtype
    """Dtype of the tensors that hold the elements; uint8 if several are packed into a byte."""
    is_signed: bool = True
    key_scales: ScaleGranularity = ScaleGranularity.NONE
    value_scales: ScaleGranularity = ScaleGranularity.NONE
    scale_dtype: torch.dtype = torch.float32
    """int8 holds binary logarithms in eighths: the scale is 2^(code / SCALE_CODES_PER_OCTAVE)."""
    zero_dtype: torch.dtype | None = None
    """Dtype of the zero points (in steps), one beside each scale inside blocks; None if there are none."""
    group_size: int = 0
    """Channels that share a scale, for `TOKEN_GROUP`; a head_dim below it is one group."""
    first_key_bits: int = 0
    """Additional bits of the keys of a block's first token."""
    has_rotated_values: bool = False
    """Whether values are stored multiplied by a Hadamard matrix along the head dimension."""

    @property
    def is_quantized(self) -> bool:
        return self.key_scales is not ScaleGranularity.NONE or self.value_scales is not ScaleGranularity.NONE

    @property
    def has_static_scales(self) -> bool:
        """Whether `KVStorage.static_scales` must be given."""
        return ScaleGranularity.STATIC in (self.key_scales, self.value_scales)

    @property
    def max_element(self) -> float:
        """The largest element: 127 of int8, 448 of fp8_e4m3, 15 of int4."""
        if self.storage.is_floating_point:
            return torch.finfo(self.storage).max
        return float(2 ** (self.bits - self.is_signed) - 1)

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

    def key_bytes(self, head_dim: int, block_size: int) -> int:
        """Bytes of one head's keys in one block: elements, scales, zero points."""
        return self._bytes(self.key_scales, head_dim, block_size) + -(-head_dim * self.first_key_bits // 8)

    def value_bytes(self, v_head_dim: int, block_size: int) -> int:
        """Bytes of one head's values in one block: elements, scales, zero points."""
        return self._bytes(self.value_scales, v_head_dim, block_size)

    def _bytes(self, granularity: ScaleGranularity, dim: int, block_size: int) -> int:
        bytes_per_scale = self.scale_dtype.itemsize + (self.zero_dtype.itemsize if self.zero_dtype else 0)
        return -(-dim * self.bits // 8) * block_size + bytes_per_scale * self.num_scales(granularity, dim, block_size)


SCALE_CODES_PER_OCTAVE = 8
"""Resolution of scales that are stored as int8: from 2^-16 to 2^15.9, each 9 % above the one before."""

ENTRY_POINT_GROUP = "pagedkv.kv_dtypes"
"""Entry points of this group name a `KVDtype` each, under its own name."""

TGI_NAMES = {"fp8_e4m3fn": "fp8_e4m3"}
"""Names of text-generation-inference that differ from ours."""

STATIC_SUFFIX = "_static"

_KV_DTYPES: dict[str, KVDtype] = {}


def register_kv_dtype(kv_dtype: KVDtype) -> KVDtype:
    """Registers a KV dtype under its name.

    Raises:
        PluginError: another dtype has this name.
    """
    known = _KV_DTYPES.setdefault(kv_dtype.name, kv_dtype)
    if known != kv_dtype:
        raise PluginError(f"the KV dtype {kv_dtype.name!r} is registered twice, with different properties")
    return kv_dtype


def find_kv_dtype(name: str) -> KVDtype:
    """Returns the KV dtype with this name (ours or text-generation-inference's). Imports a plugin's on first use.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
        PluginError: the plugin fails to import, or is not a KV dtype with this name.
    """
    name = TGI_NAMES.get(name, name)
    if name not in _KV_DTYPES:
        point = next((point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)
        if point is None:
            raise ConfigError(f"unknown KV dtype {name!r}; known: {', '.join(known_kv_dtypes())}")
        register_kv_dtype(_load_kv_dtype(point))
    return _KV_DTYPES[name]


def _load_kv_dtype(point: EntryPoint) -> KVDtype:
    try:
        kv_dtype = point.load()
    except Exception as error:  # any code of the plugin's own may run here
        raise PluginError(f"the KV dtype {point.name!r} ({point.value}) fails to import: {error}") from error
    if not isinstance(kv_dtype, KVDtype) or kv_dtype.name != point.name:
        raise PluginError(f"the entry point {point.name!r} ({point.value}) names no KVDtype of this name")
    return kv_dtype


def known_kv_dtypes() -> list[str]:
    """Names of our KV dtypes and of plugins. Does not import plugins."""
    return sorted({*_KV_DTYPES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_static_variant(kv_dtype: KVDtype) -> KVDtype:
    """Returns the KV dtype with the same elements and static scales.

    Raises:
        ConfigError: there is none.
    """
    name = kv_dtype.name if kv_dtype.has_static_scales else kv_dtype.name + STATIC_SUFFIX
    if name not in known_kv_dtypes():
        able = ", ".join(known for known in known_kv_dtypes() if known + STATIC_SUFFIX in known_kv_dtypes())
        raise ConfigError(f"the KV dtype {kv_dtype.name} takes no scales from outside; those that do: {able}")
    return find_kv_dtype(name)


FP32 = register_kv_dtype(KVDtype("fp32", 32, torch.float32))
FP16 = register_kv_dtype(KVDtype("fp16", 16, torch.float16))
BF16 = register_kv_dtype(KVDtype("bf16", 16, torch.bfloat16))


def _register_8_bits(name: str, storage: torch.dtype) -> tuple[KVDtype, KVDtype]:
    """Registers two KV dtypes of one-byte elements: with a scale per token and head, with a static scale per head."""
    per_token, static = (
        register_kv_dtype(KVDtype(full_name, 8, storage, key_scales=granularity, value_scales=granularity))
        for full_name, granularity in (
            (name, ScaleGranularity.TOKEN),
            (name + STATIC_SUFFIX, ScaleGranularity.STATIC),
        )
    )
    return per_token, static


INT8, INT8_STATIC = _register_8_bits("int8", torch.int8)
FP8_E4M3, FP8_E4M3_STATIC = _register_8_bits("fp8_e4m3", torch.float8_e4m3fn)
FP8_E5M2, FP8_E5M2_STATIC = _register_8_bits("fp8_e5m2", torch.float8_e5m2)
INT4 = register_kv_dtype(
    KVDtype(
        "int4",
        4,
        torch.uint8,
        is_signed=False,
        key_scales=ScaleGranularity.CHANNEL,
        value_scales=ScaleGranularity.TOKEN_GROUP,
        scale_dtype=torch.int8,
        zero_dtype=torch.int8,
        group_size=64,
        first_key_bits=2,
        has_rotated_values=True,
    )
)
"""Keys have outlier channels, so they share a scale and a zero point along the tokens of a block, values along channels
(Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024). The rotation spreads outliers
of values over all channels.

The first token of a sequence draws attention from all others whatever it says (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", ICLR 2024), so that an error of its key shifts every weight. A block does not
know whether it begins a sequence; so the first token of each has keys of 6 bits, for one byte a token.

An incomplete block is quantized again when a token is added, from the stored values of the tokens before it; see
`pagedkv.kernels.quantization`. This needs only the block itself, so a copied block can be continued.
"""

KV_DTYPE_OF_TORCH = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}
"""The KV dtype that `auto` stands for, by the model's dtype."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Storage of one attention layer's keys and values on one shard."""

    num_kv_heads: int
    """Heads on this shard."""
    head_dim: int
    """Head dimension of the keys."""
    v_head_dim: int
    block_size: int
    """Tokens a block."""
    kv_dtype: KVDtype

    @property
    def bytes_per_block(self) -> int:
        """Elements, scales and padding of one block in this layer."""
        dtype = self.kv_dtype
        per_head = dtype.key_bytes(self.head_dim, self.block_size) + dtype.value_bytes(self.v_head_dim, self.block_size)
        return self.num_kv_heads * per_head

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size
