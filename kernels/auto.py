"""The `auto` kernels: the first of triton, cpu and reference that supports every layer of the model.

The choice needs all layers, which come one `unsupported_reasons` call at a time. So it is repeated at each call, and
becomes final, with a log line, when the first layer's storage is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.plugin.abilities import HostLengths, MeasuresCandidates, PreparesSteps
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.config import PluginTables
from pagedkv.plugin.errors import PagedKVError, UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion, find_layer_faults, understood_features
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.registry import KERNELS, create_plugin
from pagedkv.plugin.step_plan import BlockCopy

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

CANDIDATES = ("triton", "cpu", "reference")
"""Names of plugins, the fastest first."""


_Question = tuple[AttentionSpec, KVCacheSpec, torch.dtype]
"""The arguments of one `unsupported_reasons` call."""


@dataclass
class _Candidate:
    """Kernels that may be picked, and the reasons against them."""

    name: str
    kernels: AttentionKernels | None = None
    reasons: list[str] = field(default_factory=list)
    """Reasons against it, in the order found; empty while it can be picked."""
    num_asked: int = 0

    def ask(self, questions: Sequence[_Question]) -> bool:
        """Passes new questions to the kernels. Returns whether they support all of them."""
        for question in questions[self.num_asked :]:
            if self.kernels is not None:
                found = find_layer_faults(self.kernels, *question)
                self.reasons += [reason for reason in found if reason not in self.reasons]
        self.num_asked = len(questions)
        return not self.reasons


class AutoKernels:
    """Implements `AttentionKernels` with the first candidate without a reason against it."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, candidates: Sequence[_Candidate]) -> None:
        self._candidates = list(candidates)
        self._questions: list[_Question] = []
        self._settled: AttentionKernels | None = None

    @classmethod
    def create(cls, device: torch.device, plugins: PluginTables | None = None) -> Self:
        """Creates every candidate that is installed and made for the device, with its settings in `plugins`."""
        return cls([_create_candidate(name, device, plugins or {}) for name in CANDIDATES])

    @property
    def features(self) -> frozenset[str]:
        """Those of all candidates: `unsupported_reasons` asks each of them."""
        return frozenset().union(*(understood_features(one.kernels) for one in self._candidates if one.kernels))

    @property
    def name(self) -> str:
        """Name of the kernels picked; before the first `allocate`, of those that would be picked now."""
        return self._picked().name

    @property
    def can_capture_graphs(self) -> bool:
        return self._picked().can_capture_graphs

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        """Returns every candidate's reasons, with its name, if none supports this layer and all earlier ones."""
        if self._settled is not None:
            return find_layer_faults(self._settled, spec, cache_spec, dtype)
        question = (spec, cache_spec, dtype)
        if question not in self._questions:
            self._questions.append(question)
        return [] if self._first_able() is not None else self._all_reasons()

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        """Allocates with the picked kernels. The first call makes the pick final.

        Raises:
            UnsupportedError: no candidate supports all layers; the message lists every reason.
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self._settled is None:
            self._settled = self._picked()
            skipped = [candidate for candidate in self._candidates if candidate.reasons]
            why = "; ".join(f"not {candidate.name}: {', '.join(candidate.reasons)}" for candidate in skipped)
            logger.info("attention kernels: %s (%s)", self._settled.name, why or "the first choice")
            if isinstance(self._settled, MeasuresCandidates):
                self._settled.measure(self._questions)
        return self._settled.allocate(cache_spec, num_blocks)

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._picked().store(storage, k, v, metadata)

    def begin_step(self, metadata: AttentionMetadata, host_lengths: HostLengths) -> None:
        kernels = self._picked()
        if isinstance(kernels, PreparesSteps):
            kernels.begin_step(metadata, host_lengths)

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        return self._picked().attend(q, storage, metadata, options)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self._picked().copy_blocks(storage, copies)

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._picked().read(storage, slots)

    def _picked(self) -> AttentionKernels:
        if self._settled is not None:
            return self._settled
        kernels = self._first_able()
        if kernels is None:
            raise UnsupportedError("no attention kernels serve this model: " + "; ".join(self._all_reasons()))
        return kernels

    def _first_able(self) -> AttentionKernels | None:
        return next((candidate.kernels for candidate in self._candidates if candidate.ask(self._questions)), None)

    def _all_reasons(self) -> list[str]:
        return [f"{candidate.name}: {reason}" for candidate in self._candidates for reason in candidate.reasons]


def _create_candidate(name: str, device: torch.device, tables: PluginTables) -> _Candidate:
    if name == "triton" and device.type != "cuda":
        return _Candidate(name, reasons=[f"it needs a GPU, the device is {device.type}"])
    try:
        return _Candidate(name, kernels=create_plugin(KERNELS, name, tables, device))
    except PagedKVError as error:
        return _Candidate(name, reasons=[str(error)])
