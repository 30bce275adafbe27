"""The engine of the tuning runs: the benchmark's in-process engine with counts of preemptions and a router's admission.

A router does not know the length of an answer. It reserves the longest that the client allows, and sends a request only
if all reservations fit into the capacity that the server reports: `cache.overcommit` times the physical one.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

from pagedkv.integration.measure.benchmark.runners.in_process import InProcessEngine
from pagedkv.integration.measure.benchmark.runners.protocol import Recorder, serve
from pagedkv.plugin.engine.stream import TokenStream


class TuningEngine(InProcessEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Makes an engine. `options` are those of `InProcessEngine`, and `reserved_new_tokens`.

        That is what a router reserves for each answer. At 0 there is no router: requests go to the backend as they
        arrive."""
        super().__init__(options)
        self._reserved_new_tokens: int = options["reserved_new_tokens"]

    def run(self, recorder: Recorder) -> dict[str, Any]:
        """Runs one repetition. Adds its `preemptions` and `recomputed_tokens` to the benchmark's cache figures."""
        before = self._backend.stats()
        cache = self._run_behind_router(recorder) if self._reserved_new_tokens else super().run(recorder)
        after = self._backend.stats()
        counted = {name: getattr(after, name) - getattr(before, name) for name in ("preemptions", "recomputed_tokens")}
        return {**cache, **counted}

    def _run_behind_router(self, recorder: Recorder) -> dict[str, Any]:
        self._backend.watch(recorder)
        capacity = self._engine.capacity.max_cache_tokens
        queue: deque[int] = deque()
        live: dict[int, TokenStream] = {}
        while not recorder.is_done:
            queue.extend(recorder.due())
            while queue and sum(self._reservation(recorder, index) for index in (*live, queue[0])) <= capacity:
                index = queue.popleft()
                live[index] = self._add(recorder, index)
            if not live:
                _require_waiting_helps(queue, capacity)
                recorder.wait()
                continue
            # A step generates tokens for all streams; the other streams buffer them until they are done.
            next(next(iter(live.values())))
            for index in [index for index in live if _is_done(recorder, index)]:
                deque(live.pop(index), maxlen=0)
        return self._backend.describe_cache()

    def _reservation(self, recorder: Recorder, index: int) -> int:
        return len(recorder.requests[index].prompt_ids) + self._reserved_new_tokens


def _require_waiting_helps(queue: deque[int], capacity: int) -> None:
    if queue:
        raise RuntimeError(f"request {queue[0]} reserves more than the {capacity} tokens that the server tells")


def _is_done(recorder: Recorder, index: int) -> bool:
    return recorder.times[index].num_tokens == recorder.requests[index].max_new_tokens


if __name__ == "__main__":
    serve(lambda: TuningEngine(json.loads(sys.argv[1])))
