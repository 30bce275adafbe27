"""Allocates memory for blocks, in huge pages if the system has them.

A step reads blocks in any order, each a few KiB. With pages of 4 KiB nearly every block is a TLB miss.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_PAGE_BYTES = 2 * 2**20
_TOUCHED_BYTES = 16 * 2**20
"""Bytes at the beginning of a pool that are written at once, for the first requests. Writing a pool of many GiB would
take longer than the rest of the start. The system clears other pages when they are first written, which takes 1 or 2 %
of a prompt's time."""


def allocate_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, *, num_touched_bytes: int = _TOUCHED_BYTES
) -> torch.Tensor:
    """Allocates zeros, in huge pages if the system has them.

    Args:
        num_touched_bytes: so many at the beginning are mapped at once, others by the thread that first writes a page,
            on whose NUMA node they then lie.

    Raises:
        torch.OutOfMemoryError: the system has not enough memory.
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
    zeros = whole[start : start + num_bytes]
    zeros[:num_touched_bytes].zero_()
    return zeros.view(dtype).view(shape)
