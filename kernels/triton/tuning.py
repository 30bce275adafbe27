"""Tile sizes per architecture and shape: a table read at launch, so that serving never waits for a search.

The rows were chosen by what each architecture's registers and shared memory hold (the compile report of the tests shows
both) and by the field's published choices; they are not yet tuned on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.plugin.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What of a GPU decides how kernels are launched."""

    name: str
    """Row of the tables: sm_80, sm_90, sm_100 or gfx942; a later GPU takes the nearest one's."""
    num_processors: int
    """Streaming multiprocessors or compute units."""
    has_fp8_conversion: bool
    """Whether E4M3 is converted in hardware."""


INTERPRETER = Architecture("interpreter", 1, False)
"""triton's own interpreter on a CPU: tiles that small contexts fill, one processor, so that few programs run."""


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows of queries by tokens of context."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """16 query heads by tokens of context."""

    block_n: int
    num_warps: int
    num_stages: int
    min_chunk_tiles: int
    """Tiles that repay the start of a program."""


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Into how many items, each for one tile of heads, the contexts of a batch are split."""

    max_items: int
    """Beyond one a sequence."""
    one_wave_items: int


_WAVES = 4
"""Programs queue several deep, so that the last ones to run leave little of the chip idle."""
_PROGRAMS_PER_PROCESSOR = 2


def device_architecture(device: torch.device) -> Architecture:
    """The table's row for a GPU. Raises UnsupportedError where there is none."""
    properties = torch.cuda.get_device_properties(device)
    num_processors = properties.multi_processor_count
    if torch.version.hip:
        return amd_architecture(properties.gcnArchName.split(":")[0], num_processors)
    return nvidia_architecture(properties.major * 10 + properties.minor, num_processors)


def nvidia_architecture(capability: int, num_processors: int) -> Architecture:
    """For a compute capability such as 80, of sm_80. Raises UnsupportedError for one before it."""
    if capability < 80:
        raise UnsupportedError(f"the triton kernels need sm_80 or newer; this GPU is sm_{capability}")
    # sm_12x has the shared memory of sm_8x, not that of sm_100.
    name = "sm_90" if 90 <= capability < 100 else "sm_100" if 100 <= capability < 120 else "sm_80"
    return Architecture(name, num_processors, has_fp8_conversion=capability >= 89)


def amd_architecture(name: str, num_processors: int) -> Architecture:
    """For a name such as gfx942. Raises UnsupportedError for any but that and gfx950."""
    if name not in ("gfx942", "gfx950"):
        raise UnsupportedError(f"the triton kernels need gfx942 or gfx950; this GPU is {name}")
    return Architecture("gfx942", num_processors, has_fp8_conversion=False)


_DIMS = (64, 128, 256)
"""Classes of the widest head_dim of keys and values; a narrower one takes the first."""
MAX_HEAD_DIM = _DIMS[-1]

_PREFILL_TILES = {
    "sm_80": (PrefillTiles(128, 64, 8, 3), PrefillTiles(128, 32, 8, 3), PrefillTiles(64, 32, 8, 2)),
    "sm_90": (PrefillTiles(128, 128, 8, 3), PrefillTiles(128, 128, 8, 2), PrefillTiles(128, 64, 8, 2)),
    "sm_100": (PrefillTiles(128, 128, 8, 3), PrefillTiles(128, 128, 8, 2), PrefillTiles(128, 64, 8, 2)),
    "gfx942": (PrefillTiles(128, 64, 4, 1), PrefillTiles(128, 64, 4, 1), PrefillTiles(64, 32, 4, 1)),
    "interpreter": (PrefillTiles(64, 64, 1, 1),) * 3,
}
_SINGLE_PREFILL_TILES = (PrefillTiles(32, 32, 4, 1), PrefillTiles(32, 32, 8, 1), PrefillTiles(16, 32, 8, 1))

_DECODE_TILES = {
    ("sm_80", 16): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 3, 8), DecodeTiles(32, 4, 3, 16)),
    ("sm_80", 8): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 5, 8), DecodeTiles(32, 4, 5, 16)),
    ("sm_90", 16): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 5, 8), DecodeTiles(32, 4, 5, 16)),
    ("sm_90", 8): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 5, 8), DecodeTiles(32, 4, 5, 16)),
    ("sm_100", 16): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 5, 8), DecodeTiles(32, 4, 5, 16)),
    ("sm_100", 8): (DecodeTiles(64, 4, 5, 8), DecodeTiles(64, 4, 5, 8), DecodeTiles(32, 4, 5, 16)),
    ("gfx942", 16): (DecodeTiles(64, 4, 2, 8), DecodeTiles(32, 4, 2, 16), DecodeTiles(32, 4, 1, 16)),
    ("gfx942", 8): (DecodeTiles(64, 4, 2, 8), DecodeTiles(64, 4, 2, 8), DecodeTiles(32, 4, 2, 16)),
    ("interpreter", 32): (DecodeTiles(32, 1, 1, 1),) * 3,
    ("interpreter", 16): (DecodeTiles(32, 1, 1, 1),) * 3,
    ("interpreter", 8): (DecodeTiles(32, 1, 1, 1),) * 3,
}
"""By architecture and bits of an element, 4 as 8. On NVIDIA, stages alternate between the block table and the keys and
values that wait for its entries: 3 hold one tile in flight, 5 hold two."""
_SINGLE_DECODE_TILES = (DecodeTiles(32, 4, 2, 16), DecodeTiles(32, 4, 2, 16), DecodeTiles(16, 8, 2, 16))

_INT4_PREFILL_TILES = {("sm_80", 2): PrefillTiles(32, 32, 8, 2), ("sm_100", 2): PrefillTiles(64, 64, 8, 2)}
_INT4_DECODE_TILES = {("sm_100", 1): DecodeTiles(64, 4, 3, 8)}
"""Where turning 4 bits into numbers takes more registers than those tiles leave: by architecture and class of dim."""


def prefill_tiles(architecture: Architecture, q_dtype: torch.dtype, widest_dim: int, kv_bits: int) -> PrefillTiles:
    """The table's entry; float32, in queries or in the cache, has its own for all architectures."""
    is_single = architecture.name != INTERPRETER.name and _is_single(q_dtype, kv_bits)
    row = _SINGLE_PREFILL_TILES if is_single else _PREFILL_TILES[architecture.name]
    place = _dim_class(widest_dim)
    is_int4 = kv_bits == 4 and not is_single
    return _INT4_PREFILL_TILES.get((architecture.name, place), row[place]) if is_int4 else row[place]


def decode_tiles(architecture: Architecture, q_dtype: torch.dtype, widest_dim: int, kv_bits: int) -> DecodeTiles:
    """As `prefill_tiles`."""
    is_single = architecture.name != INTERPRETER.name and _is_single(q_dtype, kv_bits)
    row = _SINGLE_DECODE_TILES if is_single else _DECODE_TILES[architecture.name, max(kv_bits, 8)]
    place = _dim_class(widest_dim)
    is_int4 = kv_bits == 4 and not is_single
    return _INT4_DECODE_TILES.get((architecture.name, place), row[place]) if is_int4 else row[place]


def split_limits(architecture: Architecture, num_head_tiles: int) -> SplitLimits:
    """So that items × tiles of heads fill the processors."""
    one_wave = -(-architecture.num_processors * _PROGRAMS_PER_PROCESSOR // num_head_tiles)
    return SplitLimits(max_items=one_wave * _WAVES, one_wave_items=one_wave)


def store_tile_tokens(architecture: Architecture, widest_dim: int) -> int:
    """Tokens that a program of 4 warps stores: about 1024 elements."""
    return 64 if architecture.name == INTERPRETER.name else max(1024 // widest_dim, 4)


def _is_single(q_dtype: torch.dtype, kv_bits: int) -> bool:
    return q_dtype == torch.float32 or kv_bits == 32


def _dim_class(widest_dim: int) -> int:
    return next(place for place, dim in enumerate(_DIMS) if widest_dim <= dim)
