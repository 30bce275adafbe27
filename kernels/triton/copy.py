"""Copies whole blocks inside a storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.launch import Launch
from pagedkv.plugin.step_plan import BlockCopy

_CHUNK = 2048
"""Words that a program moves."""


def plan_copy(blocks: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """Returns the launch that copies rows of the first dim inside a tensor.

    Args:
        pairs: [N, 2] int64, source and target row.
    """
    words = _as_words(blocks)
    row_words = words.shape[1]
    return Launch(
        _copy_kernel,
        (pairs.shape[0], triton.cdiv(row_words, _CHUNK)),
        {
            "words_ptr": words,
            "pairs_ptr": pairs,
            "row_words": row_words,
            "CHUNK": _CHUNK,
        },
        num_warps=4,
    )


def copy_pairs(copies: Sequence[BlockCopy], device: torch.device) -> torch.Tensor:
    """[N, 2] int64 on the device: source and target of each copy."""
    return torch.tensor([(copy.source, copy.target) for copy in copies], dtype=torch.int64, device=device)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as [rows, words] int32, or int16 if a row's bytes are not a multiple of 4 (odd heads in int4)."""
    rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
    return rows.view(torch.int16 if rows.shape[1] % 4 else torch.int32)


@triton.jit
def _copy_kernel(words_ptr, pairs_ptr, row_words, CHUNK: tl.constexpr):
    pair_ptr = pairs_ptr + tl.program_id(0) * 2
    source = tl.load(pair_ptr)
    target = tl.load(pair_ptr + 1)
    words = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_word = words < row_words
    loaded = tl.load(words_ptr + source * row_words + words, mask=is_word)
    tl.store(words_ptr + target * row_words + words, loaded, mask=is_word)
