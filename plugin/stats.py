"""Statistics of a backend. Counters only grow; gauges are current values. Every backend uses the same names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from pagedkv.plugin.requests import Request


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Statistics of a cache manager."""

    num_total_blocks: int
    num_used_blocks: int
    """Blocks that at least one sequence holds."""
    num_cached_blocks: int
    """Blocks with reference count 0 whose content is kept."""
    num_free_blocks: int
    num_used_slots: int
    """Slots of used blocks that hold a token; a shared block counts once."""
    prefix_cache_query_tokens: int
    """Counter: prompt tokens looked up at first admissions."""
    prefix_cache_hit_tokens: int
    """Counter: of these, tokens found."""
    evictions: int
    """Counter: cached blocks given to new content."""
    copies: int
    """Counter: blocks copied on write."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    preemptions: int
    """Counter."""
    recomputed_tokens: int
    """Counter: tokens computed again after a preemption, without those found in the prefix cache again."""


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Statistics of a backend. A contiguous backend counts one slot as one block."""

    running: int
    waiting: int
    num_total_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    block_size: int
    num_used_slots: int
    kv_bytes_in_use: int
    """Bytes of the slots that hold a token of a live sequence."""
    kv_bytes_reserved: int
    """Bytes held for live sequences: whole blocks, or a contiguous cache's room for the longest answer."""
    kv_bytes_total: int
    """Bytes of the whole pool."""
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    saved_prefill_tokens: int
    """Counter: prompt tokens of first admissions that were not computed, by a hit or a fork."""
    prompt_tokens: int
    """Counter: prompt tokens of all accepted requests."""
    generated_tokens: int
    """Counter."""
    recomputed_tokens: int
    """Counter: computed again after a preemption."""
    computed_prefill_tokens: int
    """Counter: tokens computed in steps for prompts, and again after preemptions."""
    computed_decode_tokens: int
    """Counter: tokens computed in steps one at a time, each to generate the next."""
    preemptions: int
    evictions: int
    copies: int
    steps: int

    def keys(self) -> list[str]:
        """All names. With this `dict(stats)` and `stats["running"]` work."""
        ratios = ["block_utilization", "fragmentation", "prefix_cache_hit_rate"]
        return [field.name for field in fields(self)] + ratios

    def __getitem__(self, name: str) -> float:
        if name not in self.keys():
            raise KeyError(name)
        value: float = getattr(self, name)
        return value

    @property
    def block_utilization(self) -> float:
        """Share of blocks that are used, 0..1."""
        return self.num_used_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the slots of used blocks that hold no token, 0..1."""
        num_slots = self.num_used_blocks * self.block_size
        return 1 - self.num_used_slots / num_slots if num_slots else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of queried tokens that were found, 0..1."""
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0


@dataclass(slots=True)
class Counters:
    """The backend's own counters. They only grow; a second warm-up does not reset them."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    saved_prefill_tokens: int = 0
    computed_prefill_tokens: int = 0
    computed_decode_tokens: int = 0
    steps: int = 0

    def count_request(self, request: Request) -> None:
        self.num_requests += 1
        self.prompt_tokens += len(request.prompt_ids)

    def count_step(self, outputs: Collection[object], num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.steps += 1
        self.computed_prefill_tokens += num_prefill_tokens
        self.computed_decode_tokens += num_decode_tokens
        self.generated_tokens += len(outputs)
