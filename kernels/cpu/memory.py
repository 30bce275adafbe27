"""Memory for blocks, in huge pages where the system has them.

A step reads blocks in any order, each a few KiB. In pages of 4 KiB nearly every block is a miss of the TLB.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_PAGE_BYTES = 2 * 2**20


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are all there, so that no later step waits for one or fails for lack of them.

    Raises:
        torch.OutOfMemoryError: the system has not that much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise torch.OutOfMemoryError(f"the system does not map {num_bytes} bytes: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].zero_().view(dtype).view(shape)
