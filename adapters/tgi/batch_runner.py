"""Turns a client's calls (prefill, decode, filter, clear) into steps of a backend. Runs on the step loop's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pagedkv.adapters.tgi.batches import PROBE_ID, Batch, BatchState, BatchTable, LiveRequest, describe_batch
from pagedkv.adapters.tgi.convert import EarlyEnd, NewToken
from pagedkv.adapters.tgi.prompts import TokenTexts
from pagedkv.adapters.tgi.request_reader import fit_output, refuse
from pagedkv.adapters.tgi.token_texts import end_failed, push_token
from pagedkv.plugin.errors import DuplicateRequestError, RequestError, StepError
from pagedkv.plugin.interface import Backend, Capacity, WarmupLimits
from pagedkv.plugin.observer import Observers, Outcome, Refusal
from pagedkv.plugin.requests import RequestId, StepOutput

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part", NewToken, EarlyEnd)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step for the batches that it ran."""

    tokens: list[NewToken]
    """In the order of the batch. A request without a new token waits for its prompt's next chunk or for free blocks."""
    early_ends: list[EarlyEnd]
    """Requests that were refused, or that failed alone."""
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
        texts: of the backend's tokens.
        rank: of this shard.
        num_shards: each shard reports the tokens of every num_shards-th request, so that each token is reported once.
        observers: called at each request's end and after each step.
    """

    def __init__(
        self,
        backend: Backend,
        texts: TokenTexts,
        rank: int = 0,
        num_shards: int = 1,
        observers: Observers | None = None,
    ) -> None:
        self._backend = backend
        self._texts = texts
        self._requires_padding = backend.info.requires_padding
        self._rank = rank
        self._num_shards = num_shards
        self._observers = observers or Observers()
        self._batches = BatchTable()
        self._capacity: Capacity | None = None
        self.is_warm = False
        """Whether a warm-up has succeeded, and none is running."""

    @property
    def num_requests(self) -> int:
        """Live requests. May be read from any thread."""
        return self._batches.num_requests

    def is_live(self, batch_id: int) -> bool:
        """Whether a batch of this id has live requests. May be read from any thread."""
        return batch_id in self._batches

    def warm_up(self, limits: WarmupLimits) -> Capacity:
        """Warms the backend up. Raises RequestError if requests are live, and the errors of `Backend.warmup`.

        After an error what was warmed up before still is.
        """
        if self._batches.num_requests:
            raise RequestError(f"{self._batches.num_requests} requests are live; clear them before a warm-up")
        self.is_warm = False
        try:
            self._capacity = self._backend.warmup(limits)
        finally:
            self.is_warm = self._capacity is not None
        self._report_change()
        return self._capacity

    def prefill(self, batch_id: int, requests: Sequence[LiveRequest | EarlyEnd], running_id: int | None) -> StepResult:
        """Adds a new batch and runs a step over it, together with a running batch if one is named.

        A request that the backend refuses ends alone, as those that were refused before. After any error the new
        requests have ended. Requests of the running batch continue, except those that a StepError names; after an error
        that is not listed here, they have ended too.

        Raises:
            DuplicateRequestError: the batch id or a request id is in use, or a request id comes twice.
            NotFoundError: there is no such running batch.
            UnavailableError: before the warm-up.
            StepError: the step failed for all of its requests.
        """
        try:
            running = [] if running_id is None else self._batches.find([running_id])
            self._batches.check_free(batch_id)
            return self._add_and_step(batch_id, requests, running)
        except Exception:
            if running_id is not None:
                self.give_up(running_id, batch_id)
            raise

    def give_up(self, running_id: int, new_id: int) -> None:
        """Notes that a Prefill failed: its client may have given up the running batch, and clear the new one alone."""
        self._batches.give_up(running_id, new_id)

    def decode(self, batch_ids: Sequence[int]) -> StepResult:
        """Runs a step over batches and joins them into the first.

        Raises:
            RequestError: no batch is named, or one twice.
            NotFoundError: there is no such batch; nothing has changed.
            StepError: the step failed for all requests of the batches.
        """
        if not batch_ids:
            raise RequestError("no batch is named; name at least one")
        return self._step(self._batches.find(batch_ids))

    def filter(self, batch_id: int, request_ids: Sequence[RequestId]) -> BatchState:
        """Ends the requests of a batch that are not named. Raises as `BatchTable.retain` does."""
        batch, dropped = self._batches.retain(batch_id, request_ids)
        self._abort(dropped, Outcome.ABORTED)
        return describe_batch(batch, self._requires_padding)

    def clear(self, batch_ids: Collection[int] | None = None) -> None:
        """Ends the requests of batches, or of all if None; ignores unknown ids. Ends what was given up with them too:
        after a failed Prefill a router drops the running batch, but clears the new one alone."""
        if batch_ids is None:
            ended = self._batches.pop_all()
        else:
            ended = self._batches.pop([*batch_ids, *self._batches.find_given_up(batch_ids)])
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

    def _add_and_step(
        self, batch_id: int, requests: Sequence[LiveRequest | EarlyEnd], running: Sequence[Batch]
    ) -> StepResult:
        ids = [one.request_id if isinstance(one, EarlyEnd) else one.request.id for one in requests]
        self._refuse_duplicates(ids)
        taken, refused = self._take(requests)
        batches = [*running, self._batches.open(batch_id, taken)] if taken else running
        self._report_change()
        try:
            result = self._step(batches, ids, refused)
        except Exception:
            self._abort(self._batches.pop([batch_id]), Outcome.FAILED)
            raise
        if batch_id == PROBE_ID and not running:
            # Nobody names a probe's batch again, and the next probe has the same ids.
            self._abort(self._batches.pop([PROBE_ID]), Outcome.ABORTED)
            return replace(result, batch=None)
        return result

    def _refuse_duplicates(self, request_ids: Sequence[RequestId]) -> None:
        """A client tells its requests apart by their ids: a call that mixes them up is no single request's fault."""
        seen: set[RequestId] = set()
        for request_id in request_ids:
            if request_id in seen or self._batches.has_request(request_id):
                raise DuplicateRequestError(
                    f"request {request_id} is running already, or comes twice; ids are free again after the end"
                )
            seen.add(request_id)

    def _take(self, requests: Sequence[LiveRequest | EarlyEnd]) -> tuple[list[LiveRequest], list[EarlyEnd]]:
        """Gives new requests to the backend. Returns those that it took, and those that it or others refused."""
        lives = [one for one in requests if isinstance(one, LiveRequest)]
        if self._capacity is not None:
            for live in lives:
                live.request = fit_output(live.request, self._capacity)
        try:
            self._backend.add([live.request for live in lives])
            judged = list(requests)
        except RequestError:
            judged = [self._judge(one) for one in requests]
        refused = [one for one in judged if isinstance(one, EarlyEnd)]
        for end in refused:
            logger.warning("request %d is refused (%s): %s", end.request_id, end.reason, end.message)
            self._observers.report_refusal(Refusal(end.reason), 1)
        return [one for one in judged if isinstance(one, LiveRequest)], refused

    def _judge(self, request: LiveRequest | EarlyEnd) -> LiveRequest | EarlyEnd:
        """Gives one request to the backend; the end of one that it refuses."""
        if isinstance(request, EarlyEnd):
            return request
        try:
            self._backend.add([request.request])
        except RequestError as error:
            return refuse(request.request.id, error)
        return request

    def _step(
        self, batches: Sequence[Batch], new_ids: Sequence[RequestId] = (), refused: Sequence[EarlyEnd] = ()
    ) -> StepResult:
        """Runs a step over batches. `new_ids` are all that a client sent with the call, refused ones too."""
        lives = {request_id: live for batch in batches for request_id, live in batch.requests.items()}
        self._batches.note_step(batches)
        order = [*(request_id for request_id in lives if request_id not in new_ids), *new_ids]
        started_ns = time.perf_counter_ns()
        outputs, failed = self._run(batches, lives) if lives else ([], [])
        stepped_ns = time.perf_counter_ns()
        tokens, unreadable = self._push_all(lives, outputs)
        self._end(lives, [token for token in tokens if token.final is not None])
        if lives and self._observers.steps:
            self._observers.report_step((stepped_ns - started_ns) / 1e9, self._backend.stats())
        pushed_ns = time.perf_counter_ns()
        joined = self._batches.join(batches) if batches else None
        state = None if joined is None else describe_batch(joined, self._requires_padding)
        return StepResult(
            tokens=self._own(tokens, order),
            early_ends=self._own([*refused, *failed, *unreadable], order),
            batch=state,
            forward_ns=stepped_ns - started_ns,
            text_ns=pushed_ns - stepped_ns,
            join_ns=time.perf_counter_ns() - pushed_ns if len(batches) > 1 else None,
        )

    def _run(
        self, batches: Sequence[Batch], lives: Mapping[RequestId, LiveRequest]
    ) -> tuple[list[StepOutput], list[EarlyEnd]]:
        """Runs the backend. Returns its outputs, or the ends of the requests that failed where others did not."""
        try:
            return self._backend.step(only=list(lives)), []
        except StepError as error:
            failed = [live for request_id, live in lives.items() if request_id in error.request_ids]
            self._batches.remove_requests([live.request.id for live in failed])
            self._report_ends(failed, Outcome.FAILED)
            if len(failed) == len(lives):
                raise
            return [], [self._end_failed(live, error) for live in failed]
        except Exception:
            # Whether these requests got a token is unknown, so their text can't be continued.
            self._abort(self._batches.pop([batch.id for batch in batches]), Outcome.FAILED)
            raise

    def _push_all(
        self, lives: Mapping[RequestId, LiveRequest], outputs: Sequence[StepOutput]
    ) -> tuple[list[NewToken], list[EarlyEnd]]:
        """Adds outputs to their requests. Returns the tokens, and the ends of requests whose token can't be told."""
        tokens: list[NewToken] = []
        failed: list[EarlyEnd] = []
        for output in outputs:
            live = lives[output.request_id]
            try:
                token = push_token(live, output, self._texts)
            except Exception as error:
                self._batches.remove_requests([output.request_id])
                self._abort([live], Outcome.FAILED)
                failed.append(self._end_failed(live, error))
                continue
            if token.is_first:
                self._note_first_token(live, output)
            tokens.append(token)
        return tokens, failed

    def _end_failed(self, live: LiveRequest, error: Exception) -> EarlyEnd:
        end = end_failed(live, error)
        logger.warning("request %d ends alone: %s", end.request_id, end.message)
        return end

    def _note_first_token(self, live: LiveRequest, output: StepOutput) -> None:
        live.first_token_s = time.monotonic()
        live.admitted_s = output.admitted_s
        live.num_cached_tokens = output.num_cached_tokens
        self._observers.report_first_token(live.arrived_s, live.admitted_s, live.first_token_s)

    def _own(self, answers: Sequence[_Part], order: Sequence[RequestId]) -> list[_Part]:
        """Those that this shard reports, in the order of the batch."""
        places = {request_id: place for place, request_id in enumerate(order)}
        own = [one for one in answers if places[one.request_id] % self._num_shards == self._rank]
        return sorted(own, key=lambda one: places[one.request_id])

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
