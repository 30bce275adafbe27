"""Tracks which live request belongs to which batch of the client. Nothing here runs or ends a request."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pagedkv.plugin.errors import DuplicateRequestError, NotFoundError, RequestError
from pagedkv.plugin.observer import Outcome, RequestEnd
from pagedkv.plugin.requests import Request, RequestId
from pagedkv.plugin.text import OutputText


@dataclass(slots=True)
class LiveRequest:
    """A request that the backend holds, and its output text so far."""

    request: Request
    text: OutputText
    arrived_s: float
    """Of `time.monotonic`, like all times here."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """See `RequestEnd.trace_context`."""
    prompt: str | None = None
    """The prompt text, if the log shall include it."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0

    def describe_end(self, outcome: Outcome) -> RequestEnd:
        """Returns what observers get if the request ends now."""
        return RequestEnd(
            request_id=self.request.id,
            outcome=outcome,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            arrived_s=self.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            ended_s=time.monotonic(),
            trace_context=self.trace_context,
            prompt=self.prompt,
        )


PROBE_ID = 2**64 - 1
"""Batch and request id of a router's health probe: a Prefill of one token, whose answer's batch nobody names again."""


@dataclass(slots=True)
class Batch:
    """The live requests under one batch id, in the order of responses."""

    id: int
    requests: dict[RequestId, LiveRequest]
    named_s: float = field(default_factory=time.monotonic)
    """When a step was last requested for it."""
    last_step: int = 0
    """Number of that step, among all steps; the same on all shards, as `named_s` is not."""
    given_up_with: int | None = None
    """Id of a new batch whose Prefill, which named this one too, failed; None again once this one is named."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """What is reported to a client about a batch."""

    id: int
    request_ids: tuple[RequestId, ...]
    max_tokens: int
    """Tokens that the requests may hold at their ends: the sum of their prompts and outputs. For a backend that pads:
    the number of requests times the longest prompt plus the longest output."""
    current_tokens: int
    """Upper limit of tokens in the next step: the prompt of a request without output, one token of any other."""


class BatchTable:
    """All batches by id. A batch without live requests does not exist."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._num_steps = 0

    @property
    def num_requests(self) -> int:
        # A copy, because the event loop reads what the step loop's thread writes.
        return sum(len(batch.requests) for batch in tuple(self._batches.values()))

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def find(self, batch_ids: Sequence[int]) -> list[Batch]:
        """Returns the batches with these ids, in this order.

        Raises:
            RequestError: an id is named twice.
            NotFoundError: there is no such batch.
        """
        if len(set(batch_ids)) < len(batch_ids):
            raise RequestError(f"a batch is named twice among {list(batch_ids)}; name each once")
        for batch_id in batch_ids:
            if batch_id not in self._batches:
                raise NotFoundError(f"there is no batch {batch_id}: all its requests have ended, or it never was")
        return [self._batches[batch_id] for batch_id in batch_ids]

    def note_step(self, batches: Sequence[Batch]) -> None:
        """Notes that a step was requested for these batches."""
        self._num_steps += 1
        for batch in batches:
            batch.named_s, batch.last_step = time.monotonic(), self._num_steps
            batch.given_up_with = None

    def find_older(self, timeout_s: float) -> list[tuple[int, int]]:
        """Ids of batches without a step for more than `timeout_s` seconds, and the number of the last step of each.

        May be called from any thread.
        """
        earliest_s = time.monotonic() - timeout_s
        return [(batch.id, batch.last_step) for batch in tuple(self._batches.values()) if batch.named_s < earliest_s]

    def find_untouched(self, batches: Iterable[tuple[int, int]]) -> list[int]:
        """Ids of those of the batches that are still here and have had no step since the one named with each."""
        return [
            batch_id
            for batch_id, last_step in batches
            if batch_id in self._batches and self._batches[batch_id].last_step == last_step
        ]

    def has_request(self, request_id: RequestId) -> bool:
        """Whether a request of this id is live, in any batch."""
        return any(request_id in batch.requests for batch in self._batches.values())

    def check_free(self, batch_id: int) -> None:
        """Raises DuplicateRequestError if a batch with this id exists."""
        if batch_id in self._batches:
            raise DuplicateRequestError(f"batch {batch_id} is running already; clear it first, or use another id")

    def open(self, batch_id: int, requests: Iterable[LiveRequest]) -> Batch:
        """Adds a batch of requests under a free id."""
        batch = Batch(batch_id, {live.request.id: live for live in requests})
        self._batches[batch_id] = batch
        return batch

    def join(self, batches: Sequence[Batch]) -> Batch | None:
        """Moves all requests into the first batch. Returns None if no batch has a request left."""
        for batch in batches:
            self._batches.pop(batch.id, None)
        joined = self.open(batches[0].id, [live for batch in batches for live in batch.requests.values()])
        joined.last_step = self._num_steps
        if not joined.requests:
            del self._batches[joined.id]
            return None
        return joined

    def retain(self, batch_id: int, request_ids: Sequence[RequestId]) -> tuple[Batch, list[LiveRequest]]:
        """Keeps only the named requests of a batch, in the order named; keeps its order if all are named.

        Returns:
            The batch, and the requests that were removed from it.

        Raises:
            NotFoundError: there is no such batch, or it has no such live request; nothing has changed.
            RequestError: no request is named.
        """
        (batch,) = self.find([batch_id])
        if not request_ids:
            raise RequestError(f"no request of batch {batch_id} is named to be kept; ClearCache ends a whole batch")
        unknown = [request_id for request_id in request_ids if request_id not in batch.requests]
        if unknown:
            raise NotFoundError(f"batch {batch_id} has no live requests {unknown}; it has {list(batch.requests)}")
        kept = {request_id: batch.requests[request_id] for request_id in request_ids}
        dropped = [live for request_id, live in batch.requests.items() if request_id not in kept]
        if dropped:
            batch.requests = kept
        return batch, dropped

    def remove_requests(self, request_ids: Collection[RequestId]) -> None:
        """Removes ended requests from their batches, and removes batches that become empty."""
        for batch in tuple(self._batches.values()):
            for request_id in request_ids:
                batch.requests.pop(request_id, None)
            if not batch.requests:
                del self._batches[batch.id]

    def give_up(self, batch_id: int, new_id: int) -> None:
        """Notes that the Prefill of a new batch failed that named a running one, if that still runs."""
        if batch_id in self._batches:
            self._batches[batch_id].given_up_with = new_id

    def find_given_up(self, new_ids: Collection[int]) -> list[int]:
        """Ids of the batches that were given up with some new ones."""
        return [batch.id for batch in self._batches.values() if batch.given_up_with in new_ids]

    def pop(self, batch_ids: Iterable[int]) -> list[LiveRequest]:
        """Removes batches; ignores unknown ids. Returns the requests that were in them."""
        found = [self._batches.pop(batch_id, None) for batch_id in batch_ids]
        return [live for batch in found if batch is not None for live in batch.requests.values()]

    def pop_all(self) -> list[LiveRequest]:
        """Removes every batch. Returns the requests that were in them."""
        return self.pop(list(self._batches))


def describe_batch(batch: Batch, requires_padding: bool) -> BatchState:
    """Returns what to report about a batch that has live requests."""
    lives = batch.requests.values()
    prompts = [len(live.request.prompt_ids) for live in lives]
    outputs = [live.request.params.max_new_tokens for live in lives]
    reserved = len(lives) * (max(prompts) + max(outputs)) if requires_padding else sum(prompts) + sum(outputs)
    current = sum(1 if live.num_generated_tokens else len(live.request.prompt_ids) for live in lives)
    return BatchState(batch.id, tuple(batch.requests), reserved, current)
