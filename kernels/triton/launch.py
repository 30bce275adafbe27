"""A kernel with all its arguments, decided before anything runs: what is launched is also what gets compiled ahead."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

LOG2_E = 1.4426950408889634
"""Softmax runs in base 2, the one that hardware has an instruction for: exp(x) = exp2(x × LOG2_E)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a `triton.jit` function."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """By parameter name, constexpr ones too."""
    num_warps: int
    num_stages: int = 1
    """Depth of software pipelining over the kernel's loops."""

    @property
    def compile_options(self) -> dict[str, Any]:
        """Fusing multiplications with additions is asked for: its default differs between versions of triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Queues the kernel on the current stream; an empty grid is no launch."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.compile_options)


def run_on(device: torch.device, *launches: Launch) -> None:
    """Runs launches in order; triton would take torch's current device, which need not be the tensors' own."""
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
