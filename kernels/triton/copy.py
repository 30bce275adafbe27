"""Copies whole blocks: inside a storage, between two, and to and from host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.launch import Launch
from pagedkv.plugin.step_plan import BlockCopy

_CHUNK = 2048
"""Words that a program moves."""


def plan_copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """The launch that copies rows of the first dim between two tensors of one device; they may be the same tensor.

    Args:
        pairs: [N, 2] int64, source and target row.
    """
    words, target_words = _as_words(source), _as_words(target)
    row_words = words.shape[1]
    return Launch(
        _copy_kernel,
        (pairs.shape[0], triton.cdiv(row_words, _CHUNK)),
        {
            "source_ptr": words,
            "target_ptr": target_words,
            "pairs_ptr": pairs,
            "row_words": row_words,
            "CHUNK": _CHUNK,
        },
        num_warps=4,
    )


def copy_across(source: torch.Tensor, target: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copies rows of the first dim between tensors of two devices, gathered into one transfer."""
    words, target_words = _as_words(source), _as_words(target)
    sources = torch.tensor([copy.source for copy in copies], device=source.device)
    targets = torch.tensor([copy.target for copy in copies], device=target.device)
    target_words.index_copy_(0, targets, words.index_select(0, sources).to(target.device))


def copy_pairs(copies: Sequence[BlockCopy], device: torch.device) -> torch.Tensor:
    """[N, 2] int64 on the device: source and target of each copy."""
    return torch.tensor([(copy.source, copy.target) for copy in copies], dtype=torch.int64, device=device)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as [rows, words] int32, or int16 if a row's bytes are not a multiple of 4 (odd heads in int4)."""
    rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
    return rows.view(torch.int16 if rows.shape[1] % 4 else torch.int32)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, pairs_ptr, row_words, CHUNK: tl.constexpr):
    pair_ptr = pairs_ptr + tl.program_id(0) * 2
    source = tl.load(pair_ptr)
    target = tl.load(pair_ptr + 1)
    words = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_word = words < row_words
    loaded = tl.load(source_ptr + source * row_words + words, mask=is_word)
    tl.store(target_ptr + target * row_words + words, loaded, mask=is_word)
