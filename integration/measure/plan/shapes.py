"""Attention kernels that store and compute nothing, for a step on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec


class ShapeKernels:
    """Implements `AttentionKernels`. Results have the real sizes; other memory of kernels is not counted."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    name = "shapes"
    can_capture_graphs = True

    @classmethod
    def create(cls, device: torch.device) -> ShapeKernels:
        return cls()

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        return []

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        return KVStorage(cache_spec, num_blocks, {})

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Keeps nothing."""

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], storage.spec.v_head_dim)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[Any]) -> None:
        """Keeps nothing."""

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("nothing is kept")
