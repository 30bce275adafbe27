"""What the paged backend itself counts, and its statistics from these, the cache's and the scheduler's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pagedkv.plugin.requests import Request
from pagedkv.plugin.stats import BackendStats, CacheStats, SchedulerStats

NO_CACHE = CacheStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
NO_SCHEDULER = SchedulerStats(0, 0, 0, 0)


@dataclass(slots=True)
class Counters:
    """Only grow, also over a second warm-up."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    saved_prefill_tokens: int = 0
    steps: int = 0

    def count_request(self, request: Request) -> None:
        self.num_requests += 1
        self.prompt_tokens += len(request.prompt_ids)

    def count_step(self, outputs: Collection[object]) -> None:
        self.steps += 1
        self.generated_tokens += len(outputs)


def make_stats(
    counters: Counters, cache: CacheStats, scheduler: SchedulerStats, bytes_per_block: int, block_size: int
) -> BackendStats:
    return BackendStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        num_total_blocks=cache.num_total_blocks,
        num_used_blocks=cache.num_used_blocks,
        num_cached_blocks=cache.num_cached_blocks,
        num_free_blocks=cache.num_free_blocks,
        block_size=block_size,
        num_used_slots=cache.num_used_slots,
        kv_bytes_in_use=cache.num_used_slots * bytes_per_block // block_size,
        kv_bytes_reserved=cache.num_used_blocks * bytes_per_block,
        kv_bytes_total=cache.num_total_blocks * bytes_per_block,
        prefix_cache_query_tokens=cache.prefix_cache_query_tokens,
        prefix_cache_hit_tokens=cache.prefix_cache_hit_tokens,
        saved_prefill_tokens=counters.saved_prefill_tokens,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        recomputed_tokens=scheduler.recomputed_tokens,
        preemptions=scheduler.preemptions,
        evictions=cache.evictions,
        copies=cache.copies,
        steps=counters.steps,
    )
