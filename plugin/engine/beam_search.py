"""Beam search over a backend. A beam is a request of one token, forked from the beam that it continues.

Scores, and when to stop, are those of transformers' `generate(num_beams=…)`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pagedkv.plugin.errors import CapacityError, RequestError
from pagedkv.plugin.interface import Backend, BackendInfo
from pagedkv.plugin.requests import MAX_TOP_N_TOKENS, Request, RequestId, SamplingParams, StepOutput
from pagedkv.plugin.serving.step_thread import StepThread

STEPS_BEFORE_PARENTS_END = 8
MAX_STEPS_IN_VAIN = 2000
"""Steps without a token of the search. A long prompt takes many, as it is computed in chunks; others may hold the room
for a while."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam: generated tokens, the sum of their log-probabilities, the live request that computed it."""

    token_ids: tuple[int, ...]
    logprob: float
    parent_id: RequestId | None


class OnThread:
    """The calls of a backend that a search makes, each on the backend's own thread."""

    def __init__(self, backend: Backend, thread: StepThread) -> None:
        self._backend = backend
        self._thread = thread

    @property
    def info(self) -> BackendInfo:
        return self._backend.info

    def add(self, requests: Sequence[Request]) -> None:
        self._thread.run(lambda: self._backend.add(requests))

    def step(self, only: Collection[RequestId]) -> list[StepOutput]:
        return self._thread.run(lambda: self._backend.step(only))

    def abort(self, ids: Collection[RequestId]) -> None:
        self._thread.run(lambda: self._backend.abort(ids))


class BeamSearch:
    """One search. Run it once."""

    def __init__(
        self,
        backend: OnThread,
        make_id: Callable[[], RequestId],
        num_beams: int,
        max_new_tokens: int,
        length_penalty: float,
        early_stopping: bool,
    ) -> None:
        model = backend.info.model
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._num_candidates = max(2, 1 + len(self._eos_token_ids)) * num_beams
        if num_beams < 1 or self._num_candidates > min(MAX_TOP_N_TOKENS, model.vocab_size):
            raise RequestError(f"num_beams is {num_beams}; it must be at least 1 and its candidates fit the vocabulary")
        self._max_new_tokens = max_new_tokens
        self._backend = backend
        self._make_id = make_id
        self._num_beams = num_beams
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._finished: list[tuple[float, tuple[int, ...]]] = []

    def run(self, prompt_ids: Sequence[int]) -> list[tuple[list[int], float]]:
        """Returns tokens and score of each finished beam, best first. Raises the errors of `Backend.add` and `step`."""
        beams = [Hypothesis((), 0.0, None)]
        live: list[RequestId] = []
        try:
            for length in range(1, self._max_new_tokens + 1):
                is_last = length == self._max_new_tokens
                requests = [self._make_request(prompt_ids, beam, is_last) for beam in beams]
                self._backend.add(requests)
                new = [request.id for request in requests]
                live += new
                outputs = self._run_to_tokens(new, parents=live[: -len(new)])
                self._backend.abort(live[: -len(new)])
                live = new
                candidates = self._find_candidates(beams, [outputs[id_] for id_ in new], new)
                beams = self._split_candidates(candidates, is_last)
                if not beams or not self._can_improve(beams[0], length):
                    break
        finally:
            self._backend.abort(live)
        return [(list(token_ids), score) for score, token_ids in self._finished]

    def _make_request(self, prompt_ids: Sequence[int], beam: Hypothesis, is_last: bool) -> Request:
        # The second token is never generated. It keeps the request alive, so that the next beams can fork from it.
        params = SamplingParams(max_new_tokens=1 if is_last else 2, ignore_eos=True, top_n_tokens=self._num_candidates)
        return Request(self._make_id(), [*prompt_ids, *beam.token_ids], params, parent_id=beam.parent_id)

    def _run_to_tokens(self, ids: Sequence[RequestId], parents: Sequence[RequestId]) -> dict[RequestId, StepOutput]:
        outputs: dict[RequestId, StepOutput] = {}
        num_in_vain = 0
        while len(outputs) < len(ids):
            waiting = [id_ for id_ in ids if id_ not in outputs]
            new = self._backend.step(only=waiting)
            outputs.update((output.request_id, output) for output in new)
            num_in_vain = 0 if new else num_in_vain + 1
            if num_in_vain == STEPS_BEFORE_PARENTS_END:
                # Without their parents the beams are computed again, but hold no more than their own blocks.
                self._backend.abort(parents)
            elif num_in_vain == MAX_STEPS_IN_VAIN:
                raise CapacityError(
                    f"a beam search with {self._num_beams} beams finds no room in the cache: use fewer beams or a "
                    "shorter prompt, or give the cache more memory"
                )
        return outputs

    def _find_candidates(
        self, beams: Sequence[Hypothesis], outputs: Sequence[StepOutput], ids: Sequence[RequestId]
    ) -> list[Hypothesis]:
        continued = (
            Hypothesis((*beam.token_ids, top.token_id), beam.logprob + top.logprob, id_)
            for beam, output, id_ in zip(beams, outputs, ids, strict=True)
            for top in output.top_tokens
        )
        return heapq.nlargest(self._num_candidates, continued, key=lambda candidate: candidate.logprob)

    def _split_candidates(self, candidates: Sequence[Hypothesis], is_last: bool) -> list[Hypothesis]:
        """Collects finished candidates among the first `num_beams`; returns the best others, which continue."""
        going_on: list[Hypothesis] = []
        for rank, candidate in enumerate(candidates):
            if is_last or candidate.token_ids[-1] in self._eos_token_ids:
                if rank < self._num_beams:
                    self._finish(candidate)
            elif len(going_on) < self._num_beams:
                going_on.append(candidate)
        return going_on

    def _finish(self, candidate: Hypothesis) -> None:
        if self._early_stopping and len(self._finished) == self._num_beams:
            return
        score = self._score(candidate.logprob, len(candidate.token_ids))
        self._finished.append((score, candidate.token_ids))
        self._finished.sort(key=lambda finished: -finished[0])
        del self._finished[self._num_beams :]

    def _can_improve(self, best: Hypothesis, length: int) -> bool:
        if len(self._finished) < self._num_beams:
            return True
        if self._early_stopping:
            return False
        return self._score(best.logprob, length) > self._finished[-1][0]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._length_penalty)
