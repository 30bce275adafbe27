"""The engine of the tuning runs: the benchmark's in-process engine with counts of preemptions and a router's admission.

A router does not know the length of an answer. It reserves the longest that the client allows, and sends a request only
if all reservations fit into the capacity that the server reports: `cache.overcommit` times the physical one.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from pagedkv.integration.measure.benchmark.runners.in_process import InProcessEngine
from pagedkv.integration.measure.benchmark.runners.protocol import Recorder, serve


class TuningEngine(InProcessEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Makes an engine. `options` are those of `InProcessEngine`, and `reserved_new_tokens`.

        That is what a router reserves for each answer. At 0 there is no router: requests go to the backend as they
        arrive."""
        super().__init__(options)
        self._reserved_new_tokens: int = options["reserved_new_tokens"]

    def run(self, recorder: Recorder) -> dict[str, Any]:
        """Runs one repetition. Adds its `preemptions` and `recomputed_tokens` to the benchmark's cache figures."""
        before = self._engine.stats()
        cache = super().run(recorder)
        after = self._engine.stats()
        counted = {name: getattr(after, name) - getattr(before, name) for name in ("preemptions", "recomputed_tokens")}
        return {**cache, **counted}

    def _admit(self, recorder: Recorder, waiting: deque[int], live: Sequence[int]) -> list[int]:
        if not self._reserved_new_tokens:
            return super()._admit(recorder, waiting, live)
        capacity = self._engine.capacity.max_cache_tokens
        admitted: list[int] = []
        reserved = sum(self._reservation(recorder, index) for index in live)
        while waiting and reserved + self._reservation(recorder, waiting[0]) <= capacity:
            reserved += self._reservation(recorder, waiting[0])
            admitted.append(waiting.popleft())
        if not live and not admitted:
            _require_waiting_helps(waiting, capacity)
        return admitted

    def _reservation(self, recorder: Recorder, index: int) -> int:
        return len(recorder.requests[index].prompt_ids) + self._reserved_new_tokens


def _require_waiting_helps(queue: deque[int], capacity: int) -> None:
    if queue:
        raise RuntimeError(f"request {queue[0]} reserves more than the {capacity} tokens that the server tells")


if __name__ == "__main__":
    serve(lambda: TuningEngine(json.loads(sys.argv[1])))
