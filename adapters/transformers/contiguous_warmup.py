"""Runs the largest steps of a contiguous cache once, before requests are served."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.requests import WORST_SAMPLING, Request, RequestId
from pagedkv.plugin.sampling.prefill_logprobs import prefill_logprobs
from pagedkv.plugin.sampling.sampler import Sampler

from .contiguous_batch import ContiguousBatch, LiveRow
from .contiguous_cache import CacheRows, gather_rows
from .contiguous_model import ContiguousModel

_HOST_STEP_TOKENS = 64
"""Tokens of the step on a CPU. There activations use the memory that the budget leaves; a small step is enough."""


def measure_prefill(
    model: ContiguousModel, sampler: Sampler, *, max_prefill_tokens: int, max_input_tokens: int, max_rows: int
) -> int:
    """Runs the largest prefill, with log-probabilities of every prompt token.

    Returns:
        Peak bytes in addition to the weights on a GPU, including the prompts' keys and values; 0 on a CPU.
    """
    is_host = model.device.type != "cuda"
    num_tokens = max(max_prefill_tokens, max_input_tokens)
    width = min(max_input_tokens, _HOST_STEP_TOKENS) if is_host else max_input_tokens
    num_rows = 1 if is_host else max(1, min(num_tokens // width, max_rows))
    if is_host:
        _prefill(model, sampler, num_rows, width)
        return 0
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    _prefill(model, sampler, num_rows, width)
    peak_bytes = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return peak_bytes


def measure_largest_batch(try_batch: Callable[[int], None], max_rows: int) -> int:
    """Finds the largest number of rows, up to `max_rows`, for which `try_batch` does not run out of memory.

    Raises:
        CapacityError: not even one row fits.
    """
    num_rows = max_rows
    while num_rows and not _fits(try_batch, num_rows):
        num_rows -= max(1, num_rows // 10)
    if num_rows:
        return num_rows
    raise CapacityError(
        "not one request of the limits can be decoded beside the weights: lower limits.max_total_tokens"
    )


def _fits(try_batch: Callable[[int], None], num_rows: int) -> bool:
    try:
        try_batch(num_rows)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


@torch.inference_mode()
def run_full_decode(model: ContiguousModel, sampler: Sampler, num_rows: int, max_total_tokens: int) -> None:
    """Regroups and decodes rows that each have one token left, which needs the most memory of all decodes."""
    batch = _make_batch(model, num_rows, [0] * max_total_tokens, max_columns=max_total_tokens)
    for layer, spec in zip(batch.cache.layers, model.spec.layers, strict=True):
        shape = (num_rows, spec.num_kv_heads, max_total_tokens - 1)
        keys, values = (
            torch.zeros(*shape, dim, dtype=model.spec.dtype, device=model.device)
            for dim in (spec.head_dim, spec.v_head_dim)
        )
        layer.update(keys, values)
    order = torch.arange(num_rows, device=model.device)
    batch.cache = gather_rows([CacheRows(batch.cache, order, is_last_use=True)], max_total_tokens - 1)
    for row in batch.rows:
        row.num_computed_tokens = max_total_tokens - 1
    sampler.sample(model.forward(batch.make_input(), batch.cache), [row.sampling for row in batch.rows])


@torch.inference_mode()
def _prefill(model: ContiguousModel, sampler: Sampler, num_rows: int, width: int) -> None:
    batch = _make_batch(model, num_rows, [0] * width, max_columns=width)
    logits = model.forward(batch.make_input(), batch.cache, needs_all_logits=True)
    prefill_logprobs(logits[0], torch.zeros(width, dtype=torch.int64, device=model.device))
    sampler.sample(logits[:, -1], [row.sampling for row in batch.rows])


def _make_batch(model: ContiguousModel, num_rows: int, token_ids: list[int], max_columns: int) -> ContiguousBatch:
    rows = [LiveRow.create(Request(RequestId(index), token_ids, WORST_SAMPLING), index) for index in range(num_rows)]
    return ContiguousBatch(rows, model.make_cache(max_columns), model.device)
