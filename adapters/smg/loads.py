"""How busy the worker is, as the gateway asks for it: in GetLoads, and in records on the KV event stream."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime, timezone
from importlib.metadata import version

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.plugin.serving.loop import ServingLoop

_WINDOW_S = 10.0
"""Over which the rate of generated tokens is taken."""


class LoadMeter:
    """Reads a serving loop's load.

    Args:
        loop: of the worker.
        max_running_requests: that run at the same time.
    """

    def __init__(self, loop: ServingLoop, max_running_requests: int) -> None:
        self._loop = loop
        self._max_running_requests = max_running_requests
        self._generated: deque[tuple[float, int]] = deque()
        self._num_samples = 0

    def scheduler_load(self) -> pb.SchedulerLoad:
        stats = self._loop.stats
        return pb.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=stats.num_used_blocks * stats.block_size,
            max_total_num_tokens=stats.num_total_blocks * stats.block_size,
            # Blocks that sequences hold. Cached ones are free to take: counting them would veto a warm worker for good.
            token_usage=stats.block_utilization,
            gen_throughput=self._rate(),
            cache_hit_rate=stats.prefix_cache_hit_rate,
            utilization=stats.running / self._max_running_requests,
            max_running_requests=self._max_running_requests,
            num_waiting_uncached_tokens=self._waiting_uncached_tokens(),
        )

    def response(self) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(
            timestamp=datetime.now(timezone.utc).isoformat(),
            version=version("pagedkv"),
            dp_rank_count=1,
            loads=[self.scheduler_load()],
        )

    def record(self, *, load_only: bool) -> pb.EngineLoad:
        """For the KV event stream; `load_only` where its batch has no events."""
        load = self.scheduler_load()
        self._num_samples += 1
        return pb.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            active_token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            sample=self._num_samples,
            load_only=load_only,
            cache_hit_rate=load.cache_hit_rate,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
        )

    def _waiting_uncached_tokens(self) -> int:
        return round(self._loop.num_waiting_tokens * (1 - self._loop.stats.prefix_cache_hit_rate))

    def _rate(self) -> float:
        """Generated tokens a second, since the oldest look within the window."""
        now_s, num_tokens = time.monotonic(), self._loop.stats.generated_tokens
        self._generated.append((now_s, num_tokens))
        while len(self._generated) > 2 and self._generated[1][0] < now_s - _WINDOW_S:
            self._generated.popleft()
        then_s, num_then = self._generated[0]
        return (num_tokens - num_then) / (now_s - then_s) if now_s > then_s else 0.0
