"""The triton kernels do what every kernel provider must: on a GPU, or in triton's interpreter at reduced sizes.

The interpreter takes the place of the compiler when triton is imported, so it needs a process of its own: without a GPU
these tests are run by `test_triton_interpreter.py`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton.provider import is_interpreted
from pagedkv.plugin.conformance.kernels import FULL, KernelsConformance, Profile

if not is_interpreted() and not torch.cuda.is_available():
    pytest.skip("run by test_triton_interpreter.py, in a process of its own", allow_module_level=True)

# Slots are poisoned by storing NaN, of which the interpreter's numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")

INTERPRETED = Profile(
    max_context_tokens=75,
    head_dims=(32, 80),
    group_sizes=(1, 3),
    block_sizes=(16,),
    num_random_batches=2,
    has_large_offsets=False,
)
"""The interpreter takes milliseconds for what a GPU does in nanoseconds."""


class TestTritonKernels(KernelsConformance):
    kernels_name = "triton"
    device = torch.device("cpu") if is_interpreted() else torch.device("cuda", 0)
    dtypes = (torch.float16,) if is_interpreted() else (torch.bfloat16, torch.float16)
    profile = INTERPRETED if is_interpreted() else FULL
