"""A kernel launch as an object, with all its arguments: it can be run, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

LOG2_E = 1.4426950408889634
"""Factor for softmax in base 2, for which hardware has an instruction: exp(x) = exp2(x × LOG2_E)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a `triton.jit` function."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Arguments by parameter name, constexpr ones too."""
    num_warps: int
    num_stages: int = 1
    """Depth of software pipelining over the kernel's loops."""

    @property
    def compile_options(self) -> dict[str, Any]:
        """Options of the compiler. Sets fp fusion explicitly: its default differs between versions of triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Queues the kernel on the current stream. Does nothing for an empty grid."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.compile_options)


def run_on(device: torch.device, *launches: Launch) -> None:
    """Runs launches in order on `device`: triton uses torch's current device, which may differ from the tensors'."""
    as_current: AbstractContextManager[object] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with as_current:
        for launch in launches:
            launch.run()


@triton.jit
def _nothing():
    pass


def is_interpreted() -> bool:
    """Whether triton's interpreter runs the kernels: TRITON_INTERPRET=1 was set when they were imported."""
    return not isinstance(_nothing, triton.JITFunction)
