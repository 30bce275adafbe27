"""Statistics of the contiguous backend, and the check of its bookkeeping."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pagedkv.plugin.errors import IntegrityError
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.stats import BackendStats, Counters

from .contiguous_batch import ContiguousBatch, LiveRow
from .contiguous_sizing import ContiguousCapacity


def make_stats(
    counters: Counters,
    capacity: ContiguousCapacity | None,
    running: Sequence[LiveRow],
    num_waiting: int,
    bytes_per_token: int,
) -> BackendStats:
    """Makes the statistics. A running request holds `max_total_tokens` slots, and a block is one slot."""
    num_total = capacity.num_tokens if capacity else 0
    num_reserved = len(running) * capacity.limits.max_total_tokens if capacity else 0
    num_used = sum(row.num_computed_tokens for row in running)
    return BackendStats(
        running=len(running),
        waiting=num_waiting,
        num_total_blocks=num_total,
        num_used_blocks=num_reserved,
        num_cached_blocks=0,
        num_free_blocks=num_total - num_reserved,
        block_size=1,
        num_used_slots=num_used,
        kv_bytes_in_use=num_used * bytes_per_token,
        kv_bytes_reserved=num_reserved * bytes_per_token,
        kv_bytes_total=num_total * bytes_per_token,
        prefix_cache_query_tokens=0,
        prefix_cache_hit_tokens=0,
        saved_prefill_tokens=0,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        recomputed_tokens=0,
        computed_prefill_tokens=counters.computed_prefill_tokens,
        computed_decode_tokens=counters.computed_decode_tokens,
        preemptions=0,
        evictions=0,
        copies=0,
        steps=counters.steps,
    )


def check_rows(
    capacity: ContiguousCapacity,
    waiting: Collection[RequestId],
    batches: Sequence[ContiguousBatch],
    bytes_per_token: int,
) -> None:
    """Recomputes the bookkeeping from rows and tensors. Raises IntegrityError if they disagree."""
    ids = [row.id for batch in batches for row in batch.rows]
    _require(len(set(ids)) == len(ids), "a request runs twice")
    _require(not set(waiting).intersection(ids), "a request waits and runs at once")
    _require(len(ids) <= capacity.max_rows, f"{len(ids)} rows run, there is room for {capacity.max_rows}")
    for batch in batches:
        known = [len(row.token_ids) - 1 for row in batch.rows]
        computed = [row.num_computed_tokens for row in batch.rows]
        num_columns = batch.cache.num_columns
        reserved_bytes = len(batch.rows) * capacity.limits.max_total_tokens * bytes_per_token
        _require(computed == known, f"rows of {known} known tokens have {computed} computed, not all but the newest")
        _require(num_columns == max(known), f"rows of {known} tokens are {num_columns} columns wide")
        _require(batch.cache.num_reserved_bytes == reserved_bytes, "a batch holds other room than it reserved")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
