"""Turns a client's calls (prefill, decode, filter, clear) into steps of a backend. Runs on the step loop's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagedkv.adapters.tgi.batches import Batch, BatchState, BatchTable, LiveRequest, describe_batch
from pagedkv.adapters.tgi.convert import FinalText, NewToken
from pagedkv.plugin.errors import RequestError, StepError
from pagedkv.plugin.interface import Backend, Capacity, WarmupLimits
from pagedkv.plugin.observer import Observers, Outcome
from pagedkv.plugin.requests import FinishReason, RequestId, StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step for the batches that it ran."""

    tokens: list[NewToken]
    """In the order of the batch. A request without a new token waits for its prompt's next chunk or for free blocks."""
    batch: BatchState | None
    """None once every request has ended."""
    forward_ns: int
    """Time of the backend's step."""
    text_ns: int
    """Time of turning tokens into text."""
    join_ns: int | None
    """Time of joining batches; None for a single batch."""


class BatchRunner:
    """Runs steps of a backend for batches of requests. No one else may call the backend meanwhile.

    Args:
        backend: runs the steps.
        rank: of this shard.
        num_shards: each shard reports the tokens of every num_shards-th request, so that each token is reported once.
        observers: called at each request's end and after each step.
    """

    def __init__(
        self, backend: Backend, rank: int = 0, num_shards: int = 1, observers: Observers | None = None
    ) -> None:
        self._backend = backend
        self._requires_padding = backend.info.requires_padding
        self._rank = rank
        self._num_shards = num_shards
        self._observers = observers or Observers()
        self._batches = BatchTable()
        self.is_warm = False
        """Whether the last warm-up succeeded."""

    @property
    def num_requests(self) -> int:
        """Live requests. May be read from any thread."""
        return self._batches.num_requests

    def warm_up(self, limits: WarmupLimits) -> Capacity:
        """Warms the backend up. Raises RequestError if requests are live, and the errors of `Backend.warmup`."""
        if self._batches.num_requests:
            raise RequestError(f"{self._batches.num_requests} requests are live; clear them before a warm-up")
        self.is_warm = False
        capacity = self._backend.warmup(limits)
        self.is_warm = True
        self._report_change()
        return capacity

    def prefill(self, batch_id: int, requests: Sequence[LiveRequest], running_id: int | None) -> StepResult:
        """Adds a new batch and runs a step over it, together with a running batch if one is named.

        After any error the new requests have ended. Requests of the running batch continue, except those that a
        StepError names; after an error that is not listed here, they have ended too.

        Raises:
            RequestError, CapacityError, DuplicateRequestError: a request is refused, or the batch id is in use.
            NotFoundError: there is no such running batch.
            UnavailableError: before the warm-up.
            StepError: the step failed.
        """
        running = [] if running_id is None else self._batches.find([running_id])
        self._batches.check_free(batch_id)
        self._backend.add([live.request for live in requests])
        batch = self._batches.open(batch_id, requests)
        self._report_change()
        try:
            return self._step([*running, batch])
        except Exception:
            self._abort(self._batches.pop([batch_id]), Outcome.FAILED)
            raise

    def decode(self, batch_ids: Sequence[int]) -> StepResult:
        """Runs a step over batches and joins them into the first.

        Raises:
            RequestError: no batch is named, or one twice.
            NotFoundError: there is no such batch; nothing has changed.
            StepError: the step failed; the requests that it names have ended, the batches are otherwise unchanged.
        """
        if not batch_ids:
            raise RequestError("no batch is named; name at least one")
        return self._step(self._batches.find(batch_ids))

    def filter(self, batch_id: int, request_ids: Sequence[RequestId]) -> BatchState:
        """Ends the requests of a batch that are not named. Raises as `BatchTable.retain` does."""
        batch, dropped = self._batches.retain(batch_id, request_ids)
        self._abort(dropped, Outcome.ABORTED)
        return describe_batch(batch, self._requires_padding)

    def clear(self, batch_ids: Iterable[int] | None = None) -> None:
        """Ends all requests of these batches, or of all batches for None. Ignores unknown ids."""
        ended = self._batches.pop_all() if batch_ids is None else self._batches.pop(batch_ids)
        self._abort(ended, Outcome.ABORTED)

    def find_abandoned(self, timeout_s: float) -> list[tuple[int, int]]:
        """Ids of batches without a step for more than `timeout_s` seconds, and the number of the last step of each.

        May be called from any thread.
        """
        return self._batches.find_older(timeout_s)

    def end_abandoned(self, batches: Iterable[tuple[int, int]]) -> None:
        """Ends batches that `find_abandoned` has found, except those that have had a step since."""
        batch_ids = self._batches.find_untouched(batches)
        if batch_ids:
            logger.warning("batches %s end: their client asked for no step for long, and is taken for dead", batch_ids)
            self._abort(self._batches.pop(batch_ids), Outcome.ABANDONED)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the backend's bookkeeping contradicts itself."""
        self._backend.check_integrity()

    def _step(self, batches: Sequence[Batch]) -> StepResult:
        lives = {request_id: live for batch in batches for request_id, live in batch.requests.items()}
        self._batches.note_step(batches)
        started_ns = time.perf_counter_ns()
        try:
            outputs = self._backend.step(only=list(lives))
            stepped_ns = time.perf_counter_ns()
            tokens = [self._push(lives[output.request_id], output) for output in outputs]
        except StepError as error:
            failed = [RequestId(request_id) for request_id in error.request_ids]
            self._batches.remove_requests(failed)
            self._report_ends([lives[request_id] for request_id in failed if request_id in lives], Outcome.FAILED)
            raise
        except Exception:
            # It is unknown whether these requests got a token, so their text can't be continued.
            self._abort(self._batches.pop([batch.id for batch in batches]), Outcome.FAILED)
            raise
        self._end(lives, [token for token in tokens if token.final is not None])
        if self._observers.steps:
            self._observers.report_step((stepped_ns - started_ns) / 1e9, self._backend.stats())
        pushed_ns = time.perf_counter_ns()
        joined = self._batches.join(batches)
        state = None if joined is None else describe_batch(joined, self._requires_padding)
        return StepResult(
            tokens=self._own_tokens(tokens, list(lives)),
            batch=state,
            forward_ns=stepped_ns - started_ns,
            text_ns=pushed_ns - stepped_ns,
            join_ns=time.perf_counter_ns() - pushed_ns if len(batches) > 1 else None,
        )

    def _own_tokens(self, tokens: Sequence[NewToken], request_ids: Sequence[RequestId]) -> list[NewToken]:
        """Returns the tokens that this shard reports, in the order of the batch."""
        places = {request_id: place for place, request_id in enumerate(request_ids)}
        own = [token for token in tokens if places[token.request.id] % self._num_shards == self._rank]
        return sorted(own, key=lambda token: places[token.request.id])

    def _push(self, live: LiveRequest, output: StepOutput) -> NewToken:
        is_first = live.first_token_s is None
        if is_first:
            live.first_token_s = time.monotonic()
            live.admitted_s = output.admitted_s
            live.num_cached_tokens = output.num_cached_tokens
            self._observers.report_first_token(live.arrived_s, live.admitted_s, live.first_token_s)
        live.num_generated_tokens += 1
        text = live.text.push(output.token.token_id)
        reason = output.finish_reason
        if reason is None and live.text.has_stopped:
            reason = FinishReason.STOP_SEQUENCE
        final = None if reason is None else FinalText(live.text.final_text(), live.num_generated_tokens, reason)
        return NewToken(live.request, output, text, is_first, final)

    def _end(self, lives: Mapping[RequestId, LiveRequest], last_tokens: Sequence[NewToken]) -> None:
        """Removes requests that have their last token. Aborts those that ended by a stop string in the backend."""
        if not last_tokens:
            return
        self._backend.abort([token.request.id for token in last_tokens if token.output.finish_reason is None])
        self._batches.remove_requests([token.request.id for token in last_tokens])
        for token in last_tokens:
            assert token.final is not None
            outcome = Outcome(token.final.finish_reason.value)
            self._observers.report_end(lives[token.request.id].describe_end(outcome))

    def _abort(self, lives: Sequence[LiveRequest], outcome: Outcome) -> None:
        if lives:
            self._backend.abort([live.request.id for live in lives])
            self._report_ends(lives, outcome)

    def _report_ends(self, lives: Sequence[LiveRequest], outcome: Outcome) -> None:
        for live in lives:
            self._observers.report_end(live.describe_end(outcome))
        self._report_change()

    def _report_change(self) -> None:
        if self._observers.steps:
            self._observers.report_change(self._backend.stats())
