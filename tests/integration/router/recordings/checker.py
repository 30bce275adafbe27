"""Whether a recording keeps all rules: the batching loop, and with it the rest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from .admission_rules import Admission
from .calls import Recording
from .health_rules import check_health
from .loop_calls import LoopCall, join_shards, named_batch_ids
from .request_rules import check_requests
from .rules import Tally
from .start_rules import Told, check_start


def check_recording(recording: Recording) -> Tally:
    """Runs all rules over a recording."""
    tally = Tally()
    told = check_start(recording, tally)
    if told is None:
        return tally
    calls = join_shards(recording, tally, told.end_ms)
    loop = _Loop(told, Admission(told, recording.flags["--max-batch-prefill-tokens"], tally), tally)
    for call in calls:
        loop.take(call)
    check_requests(recording, calls, told, tally)
    check_health(recording, calls, tally)
    return tally


@dataclass(frozen=True)
class _Answered:
    """A Prefill or Decode that went well, until it is known whether FilterBatch or ClearCache follows."""

    batch: Any
    live_ids: set[int]
    """Of the requests that were in the call and have not ended."""
    generation_ids: set[int]


class _Loop:
    """Follows the batching loop call by call."""

    def __init__(self, told: Told, admission: Admission, tally: Tally) -> None:
        self._has_chunking = told.info.support_chunking
        self._admission = admission
        self._tally = tally
        self._num_batches = 0
        self._last_request_id = -1
        self._running: list[Any] = []
        """Batches as last answered: one, or without chunking also the new one."""
        self._live_ids: set[int] = set()
        self._answered: _Answered | None = None
        self._clears: deque[int] = deque()
        """Batches that a failed call leaves to be cleared."""
        self._dead_batch_ids: set[int] = set()
        self._must_decode = False

    def take(self, call: LoopCall) -> None:
        self._call = call
        if self._clears:
            is_clear = call.method == "ClearCache" and call.request.id == self._clears.popleft()
            self._check("error-clears", is_clear)
            return
        if self._dead_batch_ids:
            self._check("error-drops-all", not self._dead_batch_ids & named_batch_ids(call))
        if call.method == "ClearCache":
            self._take_clear(call)
        elif call.method == "FilterBatch":
            self._take_filter(call)
        else:
            self._settle_unfiltered()
            take = self._take_prefill if call.method == "Prefill" else self._take_decode
            take(call)

    def _check(self, rule: str, is_kept: bool, text: object = "") -> None:
        self._tally.check(rule, is_kept, self._call.begin_ms, self._call.method, text)

    def _take_prefill(self, call: LoopCall) -> None:
        request = call.request
        running = self._running[0] if self._running else None
        if self._must_decode:
            self._check("decode-after-mixed", False, "a Prefill")
        if running is not None and self._has_chunking:
            is_same = request.HasField("cached_batch") and request.cached_batch == running
        else:
            is_same = not request.HasField("cached_batch")
        self._check("cached-batch", is_same, request.cached_batch)
        self._check("batch-ids", request.batch.id == self._num_batches, request.batch.id)
        self._num_batches += 1
        for item in request.batch.requests:
            self._check("request-ids", item.id > self._last_request_id, item.id)
            self._last_request_id = max(item.id, self._last_request_id)
        self._admission.admit(request.batch, running, call.begin_ms)
        new_ids = {item.id for item in request.batch.requests}
        self._must_decode = running is not None
        if self._has_chunking:
            self._running = []
            self._take_answer(call, self._live_ids | new_ids, [request.batch.id])
        else:
            self._take_answer(call, new_ids, [request.batch.id])

    def _take_decode(self, call: LoopCall) -> None:
        batches = list(call.request.batches)
        self._check("decode-batches", bool(batches) and batches == self._running, batches)
        if self._must_decode:
            self._check("decode-after-mixed", True)
        self._must_decode = False
        self._running = []
        self._take_answer(call, self._live_ids, [batch.id for batch in batches])

    def _take_answer(self, call: LoopCall, ids: set[int], clear_ids: list[int]) -> None:
        self._live_ids |= ids
        if call.error is not None:
            self._clears = deque(clear_ids)
            self._dead_batch_ids |= {*clear_ids, *(named_batch_ids(call) if self._has_chunking else ())}
            self._drop(ids)
            self._must_decode = bool(self._running)
            return
        generations = call.generations
        ended_ids = {generation.request_id for generation in generations if generation.HasField("generated_text")}
        self._drop(ended_ids & ids)
        if call.batch is None:
            self._drop(ids)
            self._must_decode = bool(self._running)
            return
        self._answered = _Answered(call.batch, ids - ended_ids, {g.request_id for g in generations})

    def _drop(self, ids: set[int]) -> None:
        self._live_ids = self._live_ids - ids
        self._admission.release(ids)

    def _settle_unfiltered(self) -> None:
        if self._answered is not None:
            num_live = len(self._answered.live_ids)
            self._check(
                "filter-if-sizes-differ", self._answered.batch.size == num_live, (self._answered.batch, num_live)
            )
            self._running.append(self._answered.batch)
            self._answered = None

    def _take_filter(self, call: LoopCall) -> None:
        answered, request = self._answered, call.request
        self._answered = None
        if answered is None:
            self._check("filter-after-answer", False, "no answer came before")
            return
        kept = list(request.request_ids)
        in_order = [id_ for id_ in answered.batch.request_ids if id_ in kept]
        is_answered = request.batch_id == answered.batch.id and kept == in_order != []
        self._check("filter-after-answer", is_answered and set(kept) <= answered.live_ids, request)
        self._check("filter-if-sizes-differ", answered.batch.size != len(kept), request)
        self._drop_gone(answered, answered.live_ids - set(kept))
        if call.error is None and call.batch is not None:
            self._running.append(call.batch)

    def _take_clear(self, call: LoopCall) -> None:
        answered = self._answered
        self._answered = None
        is_answered = answered is not None and call.request.HasField("id") and call.request.id == answered.batch.id
        self._check("clear-where-none-lives", is_answered, call.request)
        if answered is not None:
            self._drop_gone(answered, answered.live_ids)
        self._must_decode = self._must_decode and bool(self._running)

    def _drop_gone(self, answered: _Answered, gone_ids: set[int]) -> None:
        if gone_ids:
            self._check("gone-at-generation", gone_ids <= answered.generation_ids, gone_ids)
        self._drop(gone_ids)
