"""The calls of the batching loop: those to all shards taken as one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .calls import Call, Recording
from .rules import Tally

_OUTSIDE_LOOP = ("ServiceDiscovery", "Info", "Health", "Warmup")


@dataclass(frozen=True)
class LoopCall:
    """One call of the loop to all shards."""

    begin_ms: float
    end_ms: float
    method: str
    request: Any
    answers: list[Any]
    """One a shard, by rank; empty where there is an error."""
    error: str | None

    @property
    def batch(self) -> Any:
        """The batch that the last shard answered, or None."""
        answer = self.answers[-1]
        return answer.batch if answer.HasField("batch") else None

    @property
    def generations(self) -> list[Any]:
        return [generation for answer in self.answers for generation in answer.generations]


def join_shards(recording: Recording, tally: Tally, from_ms: float) -> list[LoopCall]:
    """The loop's calls after `from_ms`, in order; without one that not all shards had when the recording ended."""
    by_rank: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.method not in _OUTSIDE_LOOP and not call.is_probe and call.begin_ms >= from_ms:
            by_rank.setdefault(call.rank, []).append(call)
    if not by_rank:
        return []
    num_calls = [len(calls) for calls in by_rank.values()]
    joined = []
    for calls in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=False):
        first = calls[0]
        if len(calls) > 1:
            is_same = all((call.method, call.request) == (first.method, first.request) for call in calls)
            tally.check("every-shard", is_same, first.begin_ms, first.method)
        joined.append(_join(list(calls)))
    if len(by_rank) > 1:
        is_even = max(num_calls) - min(num_calls) <= 1
        tally.check("every-shard", is_even, joined[-1].end_ms, "", f"calls of the shards: {num_calls}")
    for before, after in pairwise(joined):
        tally.check("one-at-a-time", after.begin_ms >= before.end_ms, after.begin_ms, after.method)
    return joined


def _join(calls: list[Call]) -> LoopCall:
    errors = [call.error for call in calls if call.error is not None]
    return LoopCall(
        min(call.begin_ms for call in calls),
        max(call.end_ms for call in calls),
        calls[0].method,
        calls[0].request,
        [] if errors else [call.answer for call in calls],
        errors[0] if errors else None,
    )


def named_batch_ids(call: LoopCall) -> set[int]:
    """The batches that a call is about."""
    request = call.request
    if call.method == "ClearCache":
        return {request.id}
    if call.method == "FilterBatch":
        return {request.batch_id}
    if call.method == "Decode":
        return {batch.id for batch in request.batches}
    return {request.batch.id} | ({request.cached_batch.id} if request.HasField("cached_batch") else set())
