"""Python bindings (ctypes) of the attention library; fills the structures of csrc/*.c from tensors."""

from __future__ import annotations

import ctypes
from enum import IntFlag

import torch

from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import ScaleGranularity

DTYPE_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.uint8: 6,
}
"""Element types as in csrc/elements.h. A byte holds two elements of 4 bits."""

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Scales(ctypes.Structure):
    _fields_ = (
        ("data", _POINTER),
        ("block_stride", _INT64),
        ("head_stride", _INT64),
        ("token_stride", _INT64),
    )


class _Nibbles(ctypes.Structure):
    _fields_ = (
        ("k_first", _POINTER),
        ("k_codes", _POINTER),
        ("k_zeros", _POINTER),
        ("v_codes", _POINTER),
        ("v_zeros", _POINTER),
    )


class _AttendArgs(ctypes.Structure):
    _fields_ = (
        ("q", _POINTER),
        ("out", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("cu_seqlens_q", _POINTER),
        ("seq_lens", _POINTER),
        ("block_table", _POINTER),
        ("sinks", _POINTER),
        ("alibi_slopes", _POINTER),
        ("q_token_stride", _INT64),
        ("q_head_stride", _INT64),
        ("block_table_stride", _INT64),
        ("num_sequences", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("v_head_dim", _INT64),
        ("block_size", _INT64),
        ("sliding_window", _INT64),
        ("k_scales", _Scales),
        ("v_scales", _Scales),
        ("nibbles", _Nibbles),
        ("q_dtype", _INT32),
        ("kv_dtype", _INT32),
        ("num_threads", _INT32),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("tiles", _INT32),
    )


class _Side(ctypes.Structure):
    _fields_ = (
        ("source", _POINTER),
        ("cache", _POINTER),
        ("token_stride", _INT64),
        ("head_stride", _INT64),
        ("dim", _INT64),
        ("scales", _Scales),
    )


class _StoreArgs(ctypes.Structure):
    _fields_ = (
        ("k", _Side),
        ("v", _Side),
        ("nibbles", _Nibbles),
        ("slot_mapping", _POINTER),
        ("num_tokens", _INT64),
        ("num_kv_heads", _INT64),
        ("block_size", _INT64),
        ("dtype", _INT32),
        ("kv_dtype", _INT32),
        ("num_threads", _INT32),
    )


_NO_NIBBLES = _Nibbles()


class TileUse(IntFlag):
    """Which products of bf16 are made by tiles, as in csrc/plan.h; the others are made by vectors."""

    NOWHERE = 0
    DECODES = 1
    """Of sequences with one query."""
    PROMPTS = 2
    """Of sequences with more."""


class AttentionLibrary:
    """Calls a compiled library on torch's threads. It has one workspace, so only one caller at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.pagedkv_attend
        self._attend.argtypes = (ctypes.POINTER(_AttendArgs), _POINTER, _INT64)
        self._attend.restype = _INT64
        self.tiles_error = _request_tiles(library)
        """0 where `attend` may be called with tiles, or an error number: ENOSYS if this CPU or build has none."""
        self._store = library.pagedkv_store
        self._store.argtypes = (ctypes.POINTER(_StoreArgs),)
        self._store.restype = None
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        storage: KVStorage,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        tile_use: TileUse = TileUse.NOWHERE,
    ) -> None:
        """Writes the attention of q: [num_tokens, num_heads, head_dim] to out: [num_tokens, num_heads, v_head_dim]."""
        spec = storage.spec
        seq_lens, cu_seqlens_q = metadata.seq_lens.contiguous(), metadata.cu_seqlens_q.contiguous()
        sinks, slopes = (None if x is None else x.float().contiguous() for x in (options.sinks, options.alibi_slopes))
        arguments = _AttendArgs(
            q=q.data_ptr(),
            out=out.data_ptr(),
            k=storage.tensors["k"].data_ptr(),
            v=storage.tensors["v"].data_ptr(),
            cu_seqlens_q=cu_seqlens_q.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_table=metadata.block_table.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            alibi_slopes=None if slopes is None else slopes.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            block_table_stride=metadata.block_table.stride(0),
            num_sequences=metadata.num_sequences,
            num_heads=q.shape[1],
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            block_size=spec.block_size,
            sliding_window=options.sliding_window or 0,
            k_scales=_scales(storage, "k"),
            v_scales=_scales(storage, "v"),
            nibbles=_nibbles(storage),
            q_dtype=DTYPE_CODES[q.dtype],
            kv_dtype=DTYPE_CODES[spec.kv_dtype.storage],
            num_threads=torch.get_num_threads(),
            scale=options.scale,
            softcap=options.softcap or 0.0,
            tiles=tile_use,
        )
        needed = self._attend(arguments, self._workspace.data_ptr(), self._workspace.numel())
        if needed > self._workspace.numel():
            # Allocate 1.5 × the size: it grows a little with every step of a growing context.
            self._workspace = torch.empty(needed + needed // 2, dtype=torch.uint8)
            self._attend(arguments, self._workspace.data_ptr(), self._workspace.numel())

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Writes k, v: [num_tokens, num_kv_heads, dim] to their slots."""
        spec = storage.spec
        slots = slot_mapping.contiguous()
        self._store(
            _StoreArgs(
                k=_side(storage, "k", k),
                v=_side(storage, "v", v),
                nibbles=_nibbles(storage),
                slot_mapping=slots.data_ptr(),
                num_tokens=k.shape[0],
                num_kv_heads=spec.num_kv_heads,
                block_size=spec.block_size,
                dtype=DTYPE_CODES[k.dtype],
                kv_dtype=DTYPE_CODES[spec.kv_dtype.storage],
                num_threads=torch.get_num_threads(),
            )
        )


def _request_tiles(library: ctypes.CDLL) -> int:
    """Asks the operating system for tiles. Returns 0 or an error number."""
    request = library.pagedkv_attention_tiles_error
    request.restype = _INT32
    error: int = request()
    return error


def find_static_scales(storage: KVStorage, name: str) -> torch.Tensor:
    """Returns the static scales of side `name`: [num_kv_heads] float32.

    Raises:
        ConfigError: the storage has none.
    """
    if storage.static_scales is None:
        raise ConfigError(f"the KV dtype {storage.spec.kv_dtype.name} needs static scales, and this layer has none")
    return storage.static_scales["kv".index(name)]


def _side(storage: KVStorage, name: str, source: torch.Tensor) -> _Side:
    """Describes new keys or values, source: [num_tokens, num_kv_heads, dim], and their target."""
    return _Side(
        source=source.data_ptr(),
        cache=storage.tensors[name].data_ptr(),
        token_stride=source.stride(0),
        head_stride=source.stride(1),
        dim=source.shape[2],
        scales=_scales(storage, name),
    )


def _nibbles(storage: KVStorage) -> _Nibbles:
    """Describes the tensors of int4 other than elements."""
    tensors = storage.tensors
    if "k_first" not in tensors:
        return _NO_NIBBLES
    return _Nibbles(*(tensors[name].data_ptr() for name in ("k_first", "k_scale", "k_zero", "v_scale", "v_zero")))


def _scales(storage: KVStorage, name: str) -> _Scales:
    """The scales of side `name`, "k" or "v"."""
    spec = storage.spec
    match spec.kv_dtype.key_scales if name == "k" else spec.kv_dtype.value_scales:
        case ScaleGranularity.TOKEN:
            per_head = spec.block_size
            return _Scales(storage.tensors[f"{name}_scale"].data_ptr(), spec.num_kv_heads * per_head, per_head, 1)
        case ScaleGranularity.STATIC:
            scales = find_static_scales(storage, name)
            return _Scales(scales.data_ptr(), 0, scales.stride(0), 0)
        case _:
            return _Scales()
