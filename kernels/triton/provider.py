"""The `triton` kernels as a plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.kernels.triton.attention import plan_attention
from pagedkv.kernels.triton.copy import copy_pairs, plan_copy
from pagedkv.kernels.triton.decode import plan_decode
from pagedkv.kernels.triton.formats import is_int4, unsupported_format_reasons
from pagedkv.kernels.triton.launch import Launch, is_interpreted, run_on
from pagedkv.kernels.triton.layout import CacheArguments, allocate_storage, read_slots
from pagedkv.kernels.triton.store import plan_store
from pagedkv.kernels.triton.store_int4 import plan_rotate, plan_store_int4
from pagedkv.kernels.triton.tuning import INTERPRETER, MAX_HEAD_DIM, Architecture, device_architecture
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.step_plan import BlockCopy

if TYPE_CHECKING:
    from typing_extensions import Self

_QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonKernels:
    """Implements `AttentionKernels` on a GPU and, for tests, in triton's interpreter."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "triton"

    def __init__(self, device: torch.device, architecture: Architecture) -> None:
        self._device = device
        self._architecture = architecture
        self.can_capture_graphs = not is_interpreted()

    @classmethod
    def create(cls, device: torch.device) -> Self:
        """Makes the kernels. Raises UnsupportedError if they can't run on the device."""
        if is_interpreted():
            return cls(device, INTERPRETER)
        if device.type != "cuda":
            raise UnsupportedError(f"the triton kernels need a GPU; the device is {device.type}")
        return cls(device, device_architecture(device))

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        reasons = unsupported_format_reasons(cache_spec.kv_dtype)
        if dtype not in _QUERY_DTYPES:
            reasons.append(f"the triton kernels take queries of float16, bfloat16 or float32, not {dtype}")
        if is_interpreted() and torch.bfloat16 in (dtype, cache_spec.kv_dtype.storage):
            reasons.append("triton's interpreter computes wrong products of bfloat16")
        for what, dim in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
            if dim % 8 or not 16 <= dim <= MAX_HEAD_DIM:
                reasons.append(f"the triton kernels need a {what} of 16 to {MAX_HEAD_DIM}, a multiple of 8, not {dim}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
        if is_int4(cache_spec.kv_dtype) and cache_spec.block_size & (cache_spec.block_size - 1):
            reasons.append(f"4 bits need blocks of a power of two tokens, not {cache_spec.block_size}")
        return reasons

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        return allocate_storage(cache_spec, num_blocks, self._device)

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        cache = CacheArguments(storage)
        if is_int4(storage.spec.kv_dtype):
            self._run(*plan_store_int4(cache, k, v, metadata))
        else:
            self._run(plan_store(cache, k, v, metadata, self._architecture))

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        has_rotated_values = storage.spec.kv_dtype.has_rotated_values
        dtype = torch.float32 if has_rotated_values else q.dtype
        out = torch.empty(*q.shape[:2], storage.spec.v_head_dim, dtype=dtype, device=q.device)
        arguments = (out, q, CacheArguments(storage), metadata, options, self._architecture)
        if metadata.num_decodes:
            self._run(*plan_decode(*arguments))
        if metadata.num_decodes < metadata.num_sequences:
            self._run(plan_attention(*arguments, first_row=metadata.num_decodes))
        if not has_rotated_values:
            return out
        # A weighted sum of rotated values is the rotated sum of values: rotate one row back, not the whole context.
        rotated_back = torch.empty_like(out, dtype=q.dtype)
        self._run(plan_rotate(out, rotated_back))
        return rotated_back

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        pairs = copy_pairs(copies, self._device)
        for tensor in storage.tensors.values():
            self._run(plan_copy(tensor, pairs))

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read_slots(storage, slots, "k"), read_slots(storage, slots, "v")

    def _run(self, *launches: Launch) -> None:
        run_on(self._device, *launches)
