"""The loop that drives itself: requests in at any time, steps while there is work, tokens out by request."""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from pagedkv.plugin.errors import (
    DrainingError,
    OverloadedError,
    PagedKVError,
    StepError,
    UnavailableError,
    UnsupportedRequestError,
)
from pagedkv.plugin.features import understood_features
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.observer import Observers, Outcome
from pagedkv.plugin.requests import Request, RequestId, SamplingParams, StepOutput
from pagedkv.plugin.serving.generation import FINISH_OUTCOMES, GenerationRequest, Inbox, Sample
from pagedkv.plugin.serving.step_thread import StepThread
from pagedkv.plugin.stats import BackendStats

logger = logging.getLogger(__name__)

FIRST_ID = 1 << 62
"""Ids of the loop's requests begin here: those of a call-driven door beside it are counted from 0, and the last ones of
64 bits are a router's probes."""
MAX_FAILED_STEPS = 5
"""So many in a row, and the loop calls itself unhealthy."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.05
"""Between looks for room, where another door's requests hold all of it."""


class ServingLoop:
    """Runs a backend's steps on a step thread while samples are live. Any thread may call its methods.

    Args:
        backend: warmed up before the first `start`; its other calls go over the same thread.
        thread: of the backend.
        observers: told of each sample's end and of each step.
        is_shared: whether other doors hold requests in the same backend, which the loop must leave alone.
        max_live_samples: how many run and wait together; more are refused.
        first_id: ids of the loop's requests in the backend begin here.
    """

    def __init__(
        self,
        backend: Backend,
        thread: StepThread,
        *,
        observers: Observers | None = None,
        is_shared: bool = False,
        max_live_samples: int = 4096,
        first_id: int = FIRST_ID,
    ) -> None:
        self._backend = backend
        self._understood = understood_features(backend)
        self._thread = thread
        self._observers = observers or Observers()
        self._is_shared = is_shared
        self._max_live_samples = max_live_samples
        self._live: dict[RequestId, Sample] = {}
        self._ids = itertools.count(first_id)
        self._num_guests = 0
        self._dropped: deque[Sample] = deque()
        self._is_draining = False
        self._num_failed_steps = 0
        self._num_idle_looks = 0
        self.stats: BackendStats = thread.run(backend.stats)
        """Of the backend after the last step or change."""
        thread.set_background(self._run_step)

    @property
    def num_live(self) -> int:
        """Samples that run or wait."""
        return len(self._live)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of samples that no step has run yet. May be called from any thread."""
        waiting = (sample for sample in tuple(self._live.values()) if sample.admitted_s is None)
        return sum(len(sample.request.prompt_ids) for sample in waiting)

    def find_fault(self) -> str | None:
        """Why no work should be sent here; None while all is well. Waits for nothing."""
        if self._is_draining:
            return "the server is draining: running requests finish, new ones are refused"
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            return f"the last {self._num_failed_steps} steps have failed; the log says why"
        return None

    def start(self, generation: GenerationRequest, inbox: Inbox, consumer: object = None) -> Future[list[Sample]]:
        """Takes a prompt. The future has its samples once the backend has accepted them, before any token is delivered.

        Args:
            consumer: kept in each sample, for the inbox.

        The future raises:
            RequestError, CapacityError: the request is wrong, or can never fit.
            UnsupportedRequestError: it has parameters that the backend does not know.
            OverloadedError: too many are live already.
            UnavailableError: the loop is draining or its backend is not warmed up.
        """
        return self._thread.submit(lambda: self._start([generation], inbox, consumer)[0])

    def start_all(self, generations: Sequence[GenerationRequest], inbox: Inbox) -> Future[list[list[Sample]]]:
        """Takes several prompts, all or none; as `start`. The future has the samples of each."""
        return self._thread.submit(functools.partial(self._start, generations, inbox, None))

    def abort(self, samples: Iterable[Sample], outcome: Outcome = Outcome.ABORTED) -> None:
        """Ends samples; those that have ended are passed over. What a running step brings for them is dropped."""
        self._thread.post(functools.partial(self._abort, list(samples), outcome))

    def begin_drain(self) -> None:
        """From now on new requests are refused; running ones go on."""
        self._is_draining = True

    def drop(self, samples: Iterable[Sample]) -> None:
        """Ends samples before the next step. Takes no lock and touches nothing else: a finalizer may call it."""
        self._dropped.extend(samples)

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Context manager in which others may hold requests in the backend, which the loop then leaves alone."""
        self._thread.run(functools.partial(self._count_guest, 1))
        try:
            yield
        finally:
            self._thread.run(functools.partial(self._count_guest, -1))

    def close(self) -> None:
        """Ends every sample and takes the loop off its thread. The backend stays open."""
        self._is_draining = True
        self._thread.run(self._close)

    def run_on_thread(self, job: Callable[[], object]) -> Future[object]:
        """Runs a job between steps: any other call of the backend."""
        return self._thread.submit(job)

    def _start(self, generations: Sequence[GenerationRequest], inbox: Inbox, consumer: object) -> list[list[Sample]]:
        if self._is_draining:
            raise DrainingError("the server is draining; send new requests elsewhere")
        for generation in generations:
            if missing := generation.params.features - self._understood:
                raise UnsupportedRequestError(f"this server's backend does not know {', '.join(sorted(missing))}")
        if len(self._live) + sum(one.params.n for one in generations) > self._max_live_samples:
            raise OverloadedError(
                f"{len(self._live)} requests run and wait here, at most {self._max_live_samples} may; try again later, "
                "or elsewhere"
            )
        started = [
            [
                Sample(generation, index, self._make_request(generation, one), inbox, consumer)
                for index, one in enumerate(split_samples(generation.params))
            ]
            for generation in generations
        ]
        # The others are forked from the first one when its prompt is computed, so that it is computed once.
        self._backend.add([samples[0].request for samples in started])
        self._live.update((sample.request.id, sample) for samples in started for sample in samples)
        self._changed()
        self._thread.wake()
        return started

    def _make_request(self, generation: GenerationRequest, params: SamplingParams) -> Request:
        return Request(RequestId(next(self._ids)), generation.prompt_ids, params, generation.namespace)

    def _count_guest(self, change: int) -> None:
        self._num_guests += change

    def end_dropped(self) -> None:
        """Ends what was dropped. On the step thread alone."""
        while self._dropped:
            self._abort([self._dropped.popleft()], Outcome.ABORTED)

    def _choose_samples(self) -> list[RequestId] | None:
        """Ids of the samples to step; None is all that the backend has."""
        ids = [id_ for id_, sample in self._live.items() if not sample.inbox.is_full]
        return ids if self._is_shared or self._num_guests or len(ids) < len(self._live) else None

    def _run_step(self) -> bool:
        self.end_dropped()
        if not self._live:
            return False
        only = self._choose_samples()
        if only is not None and not only:
            # Whoever reads on wakes the thread; what is dropped meanwhile can't.
            self._thread.wait_for_job(_MAX_PAUSE_S)
            return True
        started_s = time.perf_counter()
        try:
            outputs = self._backend.step(only=only)
        except StepError as error:
            self._num_failed_steps += 1
            logger.error("a step failed", exc_info=error)
            self._end_failed([RequestId(id_) for id_ in error.request_ids if id_ in self._live], error)
        except Exception as error:
            # What it left of these requests is not known.
            self._num_failed_steps += 1
            logger.critical("the backend failed outside a step", exc_info=error)
            self._end_failed(list(self._live), StepError(f"the backend failed: {error}", list(self._live)))
        else:
            self._num_failed_steps = 0
            self._take(outputs)
            stats = self._backend.stats()
            if outputs or stats.steps != self.stats.steps:
                self._num_idle_looks = 0
                self.stats = stats
                if self._observers.steps:
                    self._observers.report_step(time.perf_counter() - started_s, stats)
            else:
                self._pause()
        return bool(self._live)

    def _pause(self) -> None:
        """Nothing could run: others hold the room, and a busy loop would hold the processor too."""
        self._num_idle_looks += 1
        self._thread.wait_for_job(min(_MIN_PAUSE_S * 2 ** min(self._num_idle_looks, 10), _MAX_PAUSE_S))

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        by_inbox: dict[int, list[tuple[Sample, StepOutput]]] = {}
        for output in outputs:
            sample = self._live.get(output.request_id)
            if sample is None:
                continue
            sample.num_generated_tokens += 1
            if sample.first_token_s is None:
                self._take_first(sample, output)
            by_inbox.setdefault(id(sample.inbox), []).append((sample, output))
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._observers.report_end(sample.describe_end(FINISH_OUTCOMES[output.finish_reason]))
        for delivered in by_inbox.values():
            delivered[0][0].inbox.deliver(delivered)

    def _take_first(self, sample: Sample, output: StepOutput) -> None:
        sample.first_token_s = time.monotonic()
        sample.admitted_s = output.admitted_s
        sample.num_cached_tokens = output.num_cached_tokens
        self._observers.report_first_token(sample.generation.arrived_s, sample.admitted_s, sample.first_token_s)
        if sample.index == 0 and sample.generation.params.n > 1:
            self._fork_siblings(sample, is_parent_live=output.finish_reason is None)

    def _fork_siblings(self, first: Sample, is_parent_live: bool) -> None:
        siblings = [
            sample for sample in self._live.values() if sample.generation is first.generation and sample is not first
        ]
        parent_id = first.request.id if is_parent_live else None
        for sample in siblings:
            sample.request = replace(sample.request, parent_id=parent_id)
        try:
            self._backend.add([sample.request for sample in siblings])
        except PagedKVError as error:
            self._end_failed([sample.request.id for sample in siblings], error)

    def _abort(self, samples: Sequence[Sample], outcome: Outcome) -> None:
        found = [sample for sample in samples if self._live.pop(sample.request.id, None) is not None]
        if not found:
            return
        first = [sample for sample in found if sample.index == 0 and sample.first_token_s is None]
        self._backend.abort([sample.request.id for sample in found])
        for sample in first:
            self._promote(sample)
        for sample in found:
            self._observers.report_end(sample.describe_end(outcome))
        self._changed()

    def _promote(self, first: Sample) -> None:
        """Lets the siblings of a first sample that ended before its prompt was computed run without it."""
        if any(sample.generation is first.generation for sample in self._live.values()):
            self._fork_siblings(first, is_parent_live=False)

    def _end_failed(self, ids: Sequence[RequestId], error: PagedKVError) -> None:
        samples = [self._live.pop(id_) for id_ in ids]
        # Siblings that still wait for the first one's prompt fail with it.
        failed_firsts = {id(one.generation) for one in samples if one.index == 0 and one.first_token_s is None}
        for id_, sample in list(self._live.items()):
            if id(sample.generation) in failed_firsts:
                samples.append(self._live.pop(id_))
        self._backend.abort([sample.request.id for sample in samples])
        by_inbox: dict[int, list[Sample]] = {}
        for sample in samples:
            by_inbox.setdefault(id(sample.inbox), []).append(sample)
            self._observers.report_end(sample.describe_end(Outcome.FAILED))
        for of_inbox in by_inbox.values():
            of_inbox[0].inbox.fail(of_inbox, error)
        self._changed()

    def _changed(self) -> None:
        self.stats = self._backend.stats()
        if self._observers.steps:
            self._observers.report_change(self.stats)

    def _close(self) -> None:
        self._end_failed(list(self._live), UnavailableError("the server has ended"))
        self._thread.set_background(None)


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of `params.n` samples: neighbouring seeds, so that a run can be repeated from the first.

    >>> [one.seed for one in split_samples(SamplingParams(n=3, seed=2**64 - 1, do_sample=True))]
    [18446744073709551615, 0, 1]
    """
    if params.n == 1:
        return [params]
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [replace(params, n=1, seed=(seed + index) % 2**64) for index in range(params.n)]
