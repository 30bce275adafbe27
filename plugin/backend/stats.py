"""The paged backend's statistics, from its own counters, the cache's and the scheduler's."""

from __future__ import annotations

from pagedkv.plugin.stats import BackendStats, CacheStats, Counters, SchedulerStats

NO_CACHE = CacheStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
NO_SCHEDULER = SchedulerStats(0, 0, 0, 0)


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
        computed_prefill_tokens=counters.computed_prefill_tokens,
        computed_decode_tokens=counters.computed_decode_tokens,
        preemptions=scheduler.preemptions,
        evictions=cache.evictions,
        copies=cache.copies,
        steps=counters.steps,
    )
