"""Tile sizes by architecture and shape: a table that is read at launch, so that serving never waits for a search.

The rows were chosen by each architecture's registers and shared memory (the compile report of the tests shows both) and
by published choices; they are not yet tuned on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.plugin.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of a GPU that decide how kernels are launched."""

    name: str
    """Row of the tables: sm_80, sm_90, sm_100 or gfx942. A later GPU uses the nearest one."""
    num_processors: int
    """Streaming multiprocessors or compute units."""
    has_fp8_conversion: bool
    """Whether E4M3 is converted in hardware."""


INTERPRETER = Architecture("interpreter", 1, False)
"""triton's interpreter on a CPU: small tiles, and one processor, so that few programs run."""


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tile of a prefill: rows of queries × tokens of context."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tile of a decode: 16 query heads × tokens of context."""

    block_n: int
    num_warps: int
    num_stages: int
    min_chunk_tiles: int
    """Least number of tiles for which starting a program is worth it."""


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Limits for splitting the contexts of a batch into work items, each for one tile of heads."""

    max_items: int
    """Most items in addition to one for each sequence."""
    one_wave_items: int


_WAVES = 4
"""Most programs, as a multiple of those that run at once. So the last ones to run leave little of the chip idle."""
_PROGRAMS_PER_PROCESSOR = 2


def device_architecture(device: torch.device) -> Architecture:
    """Returns the table's row for a GPU. Raises UnsupportedError if there is none."""
    properties = torch.cuda.get_device_properties(device)
    num_processors = properties.multi_processor_count
    if torch.version.hip:
        return amd_architecture(properties.gcnArchName.split(":")[0], num_processors)
    return nvidia_architecture(properties.major * 10 + properties.minor, num_processors)


def nvidia_architecture(capability: int, num_processors: int) -> Architecture:
    """Returns the architecture of a compute capability, for example 80 for sm_80. Raises UnsupportedError below 80."""
    if capability < 80:
        raise UnsupportedError(f"the triton kernels need sm_80 or newer; this GPU is sm_{capability}")
    # sm_12x has the shared memory of sm_8x, not that of sm_100.
    name = "sm_90" if 90 <= capability < 100 else "sm_100" if 100 <= capability < 120 else "sm_80"
    return Architecture(name, num_processors, has_fp8_conversion=capability >= 89)


def amd_architecture(name: str, num_processors: int) -> Architecture:
    """Returns the architecture of a name such as gfx942. Raises UnsupportedError for any but gfx942 and gfx950."""
    if name not in ("gfx942", "gfx950"):
        raise UnsupportedError(f"the triton kernels need gfx942 or gfx950; this GPU is {name}")
    return Architecture("gfx942", num_processors, has_fp8_conversion=False)


_DIMS = (64, 128, 256)
"""Classes of the larger head_dim of keys and values, rounded up to one of these."""
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
"""Tiles where converting 4 bits needs more registers than the others leave: by architecture and class of dim."""


def prefill_tiles(architecture: Architecture, q_dtype: torch.dtype, widest_dim: int, kv_bits: int) -> PrefillTiles:
    """Returns the table's entry. float32, in queries or in the cache, has one entry for all architectures."""
    is_single = architecture.name != INTERPRETER.name and _is_single(q_dtype, kv_bits)
    row = _SINGLE_PREFILL_TILES if is_single else _PREFILL_TILES[architecture.name]
    place = _dim_class(widest_dim)
    is_int4 = kv_bits == 4 and not is_single
    return _INT4_PREFILL_TILES.get((architecture.name, place), row[place]) if is_int4 else row[place]


def decode_tiles(architecture: Architecture, q_dtype: torch.dtype, widest_dim: int, kv_bits: int) -> DecodeTiles:
    """Returns the table's entry, like `prefill_tiles`."""
    is_single = architecture.name != INTERPRETER.name and _is_single(q_dtype, kv_bits)
    row = _SINGLE_DECODE_TILES if is_single else _DECODE_TILES[architecture.name, max(kv_bits, 8)]
    place = _dim_class(widest_dim)
    is_int4 = kv_bits == 4 and not is_single
    return _INT4_DECODE_TILES.get((architecture.name, place), row[place]) if is_int4 else row[place]


def split_limits(architecture: Architecture, num_head_tiles: int) -> SplitLimits:
    """Returns limits with which items × tiles of heads fill the processors."""
    one_wave = -(-architecture.num_processors * _PROGRAMS_PER_PROCESSOR // num_head_tiles)
    return SplitLimits(max_items=one_wave * _WAVES, one_wave_items=one_wave)


def store_tile_tokens(architecture: Architecture, widest_dim: int) -> int:
    """Returns the tokens that a program of 4 warps stores, about 1024 elements."""
    return 64 if architecture.name == INTERPRETER.name else max(1024 // widest_dim, 4)


def _is_single(q_dtype: torch.dtype, kv_bits: int) -> bool:
    return q_dtype == torch.float32 or kv_bits == 32


def _dim_class(widest_dim: int) -> int:
    return next(place for place, dim in enumerate(_DIMS) if widest_dim <= dim)
