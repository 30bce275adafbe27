"""The `cpu` kernels: vectorized C, compiled for the machine, that reads keys and values in their blocks without copies.

Within a block a head's keys are stored channel by channel and its values token by token: the lanes of a vector are
tokens in one product and channels in the other, and no sum crosses lanes. bf16 and int8 are stored in pairs along the
direction of the sum: a shift and a mask convert two steps of bf16 to floats, and processors have instructions that
multiply and add pairs of bf16 (AVX-512-BF16) and of 16-bit integers (all of x86).

    k: [num_blocks, num_kv_heads, head_dim, block_size]      pairs: [..., head_dim / 2, block_size, 2]
    v: [num_blocks, num_kv_heads, block_size, v_head_dim]    pairs: [..., block_size / 2, v_head_dim, 2]
    k_scale, v_scale: [num_blocks, num_kv_heads, block_size], if the KV dtype has a scale per token and head

Scales of tokens multiply vectors of scores and of weights, so that elements only have to be converted to floats.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.kernels.cpu.attention_choice import AttentionChoice, AttentionShape, measure_attention
from pagedkv.kernels.cpu.compiler import CompilerError, load_library
from pagedkv.kernels.cpu.dense_attention import attend_prompt, find_dense_rows, find_slots, without_rows
from pagedkv.kernels.cpu.library import DTYPE_CODES, AttentionLibrary, TileUse, find_static_scales
from pagedkv.kernels.cpu.memory import allocate_zeros
from pagedkv.kernels.cpu.nibbles import are_supported_nibbles, list_nibble_tensors, read_nibbles
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVCacheSpec, KVDtype, ScaleGranularity
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.step_plan import BlockCopy

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_HEAD_DIM_MULTIPLE = 16
"""Number of floats in the widest vectors."""
_MAX_BLOCK_SIZE = 512
UNMEASURED_CHOICE = AttentionChoice(TileUse.PROMPTS)
"""Prompts have enough rows to fill tiles; decodes wait for memory."""


class CpuKernels:
    """Implements `AttentionKernels` on CPUs for every KV dtype of `pagedkv.plugin.kv_dtypes`."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "cpu"
    can_capture_graphs = False

    def __init__(
        self,
        device: torch.device,
        compiler_flags: tuple[str, ...] = (),
        choice: AttentionChoice = UNMEASURED_CHOICE,
    ) -> None:
        """Makes the kernels. For tests, `compiler_flags` are added to the native ones, to build for other instruction
        sets. `choice` is what computes layers until `measure` is called; without tiles, its tiles are vectors."""
        self._device = device
        self._compiler_flags = compiler_flags
        self._choice = choice
        self._choices: dict[AttentionShape, AttentionChoice] = {}
        """Of each shape, where shapes differ in what is fastest."""
        self._loaded: AttentionLibrary | None = None

    @classmethod
    def create(cls, device: torch.device) -> Self:
        return cls(device)

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        """See `AttentionKernels`. Compiles the library last: the first time this takes seconds."""
        reasons = []
        if self._device.type != "cpu":
            reasons.append(f"it needs a CPU, the device is {self._device.type}")
        if not _is_supported(cache_spec.kv_dtype):
            reasons.append(f"the KV dtype {cache_spec.kv_dtype.name} is not implemented")
        if dtype not in KV_DTYPE_OF_TORCH:
            reasons.append(f"queries of {dtype} are not implemented")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
        odd_dims = {dim for dim in (spec.head_dim, spec.v_head_dim) if dim % _HEAD_DIM_MULTIPLE}
        reasons += [f"the head size {dim} is no multiple of {_HEAD_DIM_MULTIPLE}" for dim in sorted(odd_dims)]
        if cache_spec.block_size % 8 or _MAX_BLOCK_SIZE % cache_spec.block_size:
            reasons.append(f"the block size {cache_spec.block_size} is no power of two from 8 to {_MAX_BLOCK_SIZE}")
        return reasons or self._library_faults()

    def measure(self, layers: Sequence[tuple[AttentionSpec, KVCacheSpec, torch.dtype]]) -> None:
        """See `MeasuresCandidates`. Takes less than half a second a shape; with figures kept on disk, nearly none."""
        shapes = dict.fromkeys(AttentionShape(spec.num_heads, cache_spec, dtype) for spec, cache_spec, dtype in layers)
        choices = {shape: measure_attention(self, self._library, shape) for shape in shapes}
        self._choice = next(iter(choices.values()), self._choice)
        self._choices = choices if len(set(choices.values())) > 1 else {}

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        if are_supported_nibbles(cache_spec.kv_dtype):
            parts = list_nibble_tensors(cache_spec).items()
            return KVStorage(
                cache_spec,
                num_blocks,
                {name: allocate_zeros((num_blocks, *shape), dtype) for name, (shape, dtype) in parts},
            )
        size, dim, v_dim = cache_spec.block_size, cache_spec.head_dim, cache_spec.v_head_dim
        shapes: dict[str, tuple[int, ...]]
        if _is_paired(cache_spec.kv_dtype):
            shapes = {"k": (dim // 2, size, 2), "v": (size // 2, v_dim, 2)}
        else:
            shapes = {"k": (dim, size), "v": (size, v_dim)}
        per_head = (num_blocks, cache_spec.num_kv_heads)
        tensors = {
            name: allocate_zeros((*per_head, *shape), cache_spec.kv_dtype.storage) for name, shape in shapes.items()
        }
        for name, granularity in _granularities(cache_spec.kv_dtype).items():
            if granularity is ScaleGranularity.TOKEN:
                tensors[f"{name}_scale"] = allocate_zeros((*per_head, size), torch.float32)
        return KVStorage(cache_spec, num_blocks, tensors)

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._library.store(storage, k, v, metadata.slot_mapping)

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], storage.spec.v_head_dim)
        choice = self._choice
        if self._choices:
            choice = self._choices.get(AttentionShape(q.shape[1], storage.spec, q.dtype), choice)
        tile_use = TileUse.NOWHERE if self._library.tiles_error else choice.tile_use
        dense_rows = find_dense_rows(metadata, options) if choice.uses_torch else []
        rest = without_rows(metadata, [row for row, _, _ in dense_rows]) if dense_rows else metadata
        self._library.attend(q, out, storage, rest, options, tile_use)
        for row, start, count in dense_rows:
            k, v = self.read(storage, find_slots(metadata, row, count, storage.spec.block_size))
            out[start : start + count] = attend_prompt(q[start : start + count], k, v, options.scale)
        return out

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies])
        targets = torch.tensor([copy.target for copy in copies])
        for tensor in map(_bytes_of, storage.tensors.values()):
            tensor.index_copy_(0, targets, tensor[sources])

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if are_supported_nibbles(storage.spec.kv_dtype):
            return read_nibbles(storage, slots)
        spec = storage.spec
        blocks, offsets = slots // spec.block_size, slots % spec.block_size
        k, v = (_bytes_of(storage.tensors[name]) for name in ("k", "v"))
        if _is_paired(spec.kv_dtype):
            keys = k[blocks, :, :, offsets].flatten(2)
            values = v[blocks, :, offsets // 2, :, offsets % 2]
        else:
            keys = k[blocks, :, :, offsets]
            values = v[blocks, :, offsets]
        k_scales, v_scales = (_read_scales(storage, name, blocks, offsets) for name in ("k", "v"))
        keys, values = (elements.view(spec.kv_dtype.storage).float() for elements in (keys, values))
        return keys * k_scales, values * v_scales

    @property
    def _library(self) -> AttentionLibrary:
        if self._loaded is None:
            self._loaded = AttentionLibrary(load_library(self._compiler_flags))
            report_refused_tiles(self._loaded.tiles_error)
        return self._loaded

    def _library_faults(self) -> list[str]:
        try:
            self._loaded = self._library
        except CompilerError as error:
            return [str(error)]
        return []


@cache
def report_refused_tiles(error: int) -> None:
    """Logs, once, that tiles are not used although the CPU has them."""
    if error and error != errno.ENOSYS:
        logger.warning("the operating system refuses tiles (AMX), attention goes without: %s", os.strerror(error))
    elif error and "amx_bf16" in Path("/proc/cpuinfo").read_text():
        logger.warning("the C compiler does not know tiles (AMX), attention goes without: gcc 11 or clang 12 do")


def _is_supported(kv_dtype: KVDtype) -> bool:
    if kv_dtype in KV_DTYPE_OF_TORCH.values() or are_supported_nibbles(kv_dtype):
        return True
    granularities = set(_granularities(kv_dtype).values())
    return (
        granularities <= {ScaleGranularity.TOKEN, ScaleGranularity.STATIC}
        and kv_dtype.storage in DTYPE_CODES
        and kv_dtype.bits == 8
        and kv_dtype.scale_dtype == torch.float32
        and kv_dtype.zero_dtype is None
        and not kv_dtype.first_key_bits
        and not kv_dtype.has_rotated_values
    )


def _is_paired(kv_dtype: KVDtype) -> bool:
    return kv_dtype.storage in (torch.bfloat16, torch.int8)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Views 8-bit elements as bytes: torch can't index 8-bit floats on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _granularities(kv_dtype: KVDtype) -> dict[str, ScaleGranularity]:
    return {"k": kv_dtype.key_scales, "v": kv_dtype.value_scales}


def _read_scales(storage: KVStorage, name: str, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | float:
    """Scales of side `name` at places [N] of blocks [N], that multiply [N, num_kv_heads, dim]."""
    match _granularities(storage.spec.kv_dtype)[name]:
        case ScaleGranularity.TOKEN:
            return storage.tensors[f"{name}_scale"][blocks, :, offsets][..., None]
        case ScaleGranularity.STATIC:
            return find_static_scales(storage, name)[:, None]
        case _:
            return 1.0
