"""Abilities of attention kernels: what makes them better, and what the engine does without it.

An ability is found by `isinstance`; a class has it if it has its methods. Other abilities: `pagedkv.plugin.kv_events`
(cache managers and backends) and `BringsKVScales` of `pagedkv.plugin.kv_scales` (model adapters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.plugin.attention_metadata import AttentionMetadata
from pagedkv.plugin.kv_dtypes import KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Lengths of a step's rows on the host, where reading them waits for no device."""

    query_lens: npt.NDArray[np.int32]
    """[B] int32: query tokens of each row."""
    seq_lens: npt.NDArray[np.int32]
    """[B] int32: as `AttentionMetadata.seq_lens`; 0 in rows that only pad."""


@runtime_checkable
class PreparesSteps(Protocol):
    """Attention kernels that compute once a step what is the same in all layers."""

    def begin_step(self, metadata: AttentionMetadata, host_lengths: HostLengths) -> None:
        """Prepares a step. Called before the first layer, or before a graph is replayed whose layers read `metadata`.

        Until the next call, `store` and `attend` come with this very object; a replayed graph was captured with an
        object over the same memory. They may also come with another object, of a caller that does not prepare its
        steps: that must give the same results.
        """


@runtime_checkable
class MeasuresCandidates(Protocol):
    """Attention kernels that have more than one way to compute a layer, and time them on this machine."""

    def measure(self, layers: Sequence[tuple[AttentionSpec, KVCacheSpec, torch.dtype]]) -> None:
        """Chooses what computes each layer: its spec, its storage, and the dtype of its queries.

        Called at most once, before the first `allocate`, with layers that `unsupported_reasons` has found no fault in.
        Without it the kernels use what is fast as a rule.
        """
