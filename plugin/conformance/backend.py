"""Conformance suite for `Backend` plugins, in pytest.

A plugin author's test file:

    from pagedkv.plugin.conformance.backend import BackendConformance

    class TestMyBackend(BackendConformance):
        def make_backend(self) -> Backend:                # of a small model, not warmed up
            return MyBackend.create(config)

pytest runs it like any test class. After each test no request may be live, and `check_integrity` must pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from pagedkv.plugin.errors import CapacityError, DuplicateRequestError, RequestError, UnavailableError
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.requests import FinishReason, Request, RequestId, SamplingParams, StepOutput

Outputs = dict[int, list[StepOutput]]


def make_request(id_: int, prompt_ids: Sequence[int], parent_id: int | None = None, **params: Any) -> Request:
    """Makes a request that runs to its length. `params` are those of SamplingParams."""
    sampling = SamplingParams(**{"max_new_tokens": 6, "ignore_eos": True, **params})
    return Request(RequestId(id_), prompt_ids, sampling, parent_id=None if parent_id is None else RequestId(parent_id))


def run(backend: Backend, requests: Sequence[Request] = (), only: Collection[RequestId] | None = None) -> Outputs:
    """Adds requests and runs steps until they, or all live ones, have ended."""
    backend.add(requests)
    outputs: Outputs = defaultdict(list)
    while backend.has_unfinished():
        for output in backend.step(only):
            outputs[output.request_id].append(output)
        backend.check_integrity()
    return outputs


def token_ids(outputs: Sequence[StepOutput]) -> list[int]:
    return [output.token.token_id for output in outputs]


class BackendConformance:
    """The suite. Subclass it and implement `make_backend`."""

    prompts: ClassVar[Sequence[Sequence[int]]] = ([5], [7, 8] * 9, list(range(3, 36)), [9] * 16)
    """Prompts of token ids within the model's vocabulary."""

    def make_backend(self) -> Backend:
        """Returns a backend of a small model, not warmed up, whose cache can hold all prompts at once."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = self.make_backend()
        backend.warmup(WarmupLimits())
        yield backend
        backend.check_integrity()
        stats = backend.stats()
        assert not backend.has_unfinished()
        assert (stats.running, stats.waiting, stats.num_used_blocks, stats.kv_bytes_in_use) == (0, 0, 0, 0)
        backend.close()

    def requests(self, **params: Any) -> list[Request]:
        return [make_request(index, prompt, **params) for index, prompt in enumerate(self.prompts)]

    def test_output_is_the_same_alone_and_among_others(self, backend: Backend) -> None:
        together = run(backend, self.requests())
        for request in self.requests():
            assert token_ids(run(backend, [request])[request.id]) == token_ids(together[request.id])

    def test_request_that_comes_later_is_as_if_it_were_alone(self, backend: Backend) -> None:
        first, second = self.requests(max_new_tokens=10)[1:3]
        alone = token_ids(run(backend, [second])[second.id])
        backend.add([first])
        for _ in range(3):
            backend.step()
        assert token_ids(run(backend, [second])[second.id]) == alone

    def test_every_request_ends_once_with_its_length(self, backend: Backend) -> None:
        for outputs in run(backend, self.requests(max_new_tokens=4)).values():
            assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]

    def test_outputs_of_a_step_come_in_the_order_of_adding(self, backend: Backend) -> None:
        requests = [make_request(10 - index, prompt) for index, prompt in enumerate(self.prompts)]
        backend.add(requests)
        order = [request.id for request in requests]
        while backend.has_unfinished():
            ids = [output.request_id for output in backend.step()]
            assert ids == [id_ for id_ in order if id_ in ids]

    def test_step_of_some_requests_gives_no_other_a_token(self, backend: Backend) -> None:
        requests = self.requests()
        backend.add(requests)
        wanted = {requests[1].id, requests[2].id}
        for _ in range(3):
            assert {output.request_id for output in backend.step(only=wanted)} <= wanted
        run(backend)

    def test_forked_request_is_as_if_it_were_alone(self, backend: Backend) -> None:
        prompt = self.prompts[2]
        alone = token_ids(run(backend, [make_request(0, prompt)])[0])
        backend.add([make_request(1, prompt)])
        backend.step()
        forked = run(backend, [make_request(2, prompt, parent_id=1), make_request(3, [*prompt, 4], parent_id=1)])
        assert token_ids(forked[2]) == alone
        assert token_ids(forked[3]) == token_ids(run(backend, [make_request(4, [*prompt, 4])])[4])

    def test_seed_repeats_a_request_whatever_is_beside_it(self, backend: Backend) -> None:
        request = make_request(99, self.prompts[1], seed=3, temperature=2.0)
        outputs = run(backend, [request])[99]
        assert outputs[0].seed == 3
        among = run(backend, [*self.requests(temperature=2.0), request])[99]
        assert token_ids(among) == token_ids(outputs)

    def test_prompt_logprobs_come_whole_in_the_first_output(self, backend: Backend) -> None:
        first, second = (run(backend, self.requests(prefill_logprobs=True)) for _ in range(2))
        for index, prompt in enumerate(self.prompts):
            logprobs = first[index][0].prefill_logprobs
            assert logprobs is not None
            assert len(logprobs) == len(prompt)
            assert math.isnan(logprobs[0])
            assert logprobs[1:] == pytest.approx(second[index][0].prefill_logprobs[1:], abs=1e-4)  # type: ignore[index]
            assert all(output.prefill_logprobs is None for output in first[index][1:])

    def test_best_of_the_top_tokens_is_the_greedy_one(self, backend: Backend) -> None:
        for outputs in run(backend, self.requests(top_n_tokens=3)).values():
            for output in outputs:
                assert output.top_tokens[0].token_id == output.token.token_id
                assert output.top_tokens[0].logprob == pytest.approx(output.token.logprob, abs=1e-5)

    def test_refused_call_takes_nothing(self, backend: Backend) -> None:
        good, prompt = make_request(0, self.prompts[0]), self.prompts[0]
        num_tokens = backend.info.model.max_position_tokens
        for bad, error in (
            (make_request(1, []), RequestError),
            (make_request(1, [backend.info.model.vocab_size]), RequestError),
            (make_request(1, [-1]), RequestError),
            (make_request(0, prompt), DuplicateRequestError),
            (make_request(1, prompt, max_new_tokens=num_tokens), CapacityError),
            (make_request(1, [*prompt] * num_tokens), CapacityError),
        ):
            with pytest.raises(error):
                backend.add([good, bad])
            assert not backend.has_unfinished()

    def test_live_id_is_refused_and_free_after_the_end(self, backend: Backend) -> None:
        backend.add([make_request(0, self.prompts[0])])
        with pytest.raises(DuplicateRequestError):
            backend.add([make_request(0, self.prompts[1])])
        run(backend)
        assert len(run(backend, [make_request(0, self.prompts[1])])[0]) == 6

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_aborted_request_gives_everything_back_and_others_go_on(self, backend: Backend, num_steps: int) -> None:
        first, second = self.requests(max_new_tokens=9)[1:3]
        alone = token_ids(run(backend, [second])[second.id])
        backend.add([first, second])
        tokens = [output for _ in range(num_steps) for output in backend.step() if output.request_id == second.id]
        backend.abort([first.id, RequestId(12345)])
        tokens += run(backend)[second.id]
        assert token_ids(tokens) == alone

    def test_statistics_add_up(self, backend: Backend) -> None:
        backend.add(self.requests())
        while backend.has_unfinished():
            backend.step()
            stats = backend.stats()
            assert stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks == stats.num_total_blocks
            assert 0 <= stats.block_utilization <= 1
            assert 0 <= stats.fragmentation <= 1
            assert stats.kv_bytes_in_use <= stats.kv_bytes_reserved <= stats.kv_bytes_total
        stats = backend.stats()
        assert stats.prompt_tokens == sum(map(len, self.prompts))
        assert stats.generated_tokens == 6 * len(self.prompts)

    def test_warmup_is_refused_while_requests_are_live(self, backend: Backend) -> None:
        backend.add([make_request(0, self.prompts[0])])
        with pytest.raises(UnavailableError):
            backend.warmup(WarmupLimits())
        run(backend)
        assert backend.warmup(WarmupLimits()).max_cache_tokens > 0

    @pytest.mark.parametrize(("max_input_tokens", "max_total_tokens"), [(0, 0), (0, 24), (5, 0), (5, 24), (23, 24)])
    def test_warmup_answers_the_lengths_asked_for_and_serves_them(
        self, backend: Backend, max_input_tokens: int, max_total_tokens: int
    ) -> None:
        capacity = backend.warmup(WarmupLimits(max_input_tokens, max_total_tokens))
        assert capacity.max_input_tokens == max_input_tokens or not max_input_tokens
        assert capacity.max_total_tokens == max_total_tokens or not max_total_tokens
        assert 1 <= capacity.max_input_tokens < capacity.max_total_tokens <= capacity.max_cache_tokens
        prompt = [5] * min(capacity.max_input_tokens, 40)
        num_new_tokens = min(capacity.max_total_tokens - len(prompt), 40)
        assert len(run(backend, [make_request(0, prompt, max_new_tokens=num_new_tokens)])[0]) == num_new_tokens
        for length, max_new_tokens in [(capacity.max_input_tokens + 1, 1), (1, capacity.max_total_tokens)]:
            with pytest.raises(CapacityError):
                backend.add([make_request(1, [5] * length, max_new_tokens=max_new_tokens)])

    @pytest.mark.parametrize(
        "limits",
        [WarmupLimits(max_total_tokens=2**30), WarmupLimits(24, 24)],
        ids=["more than the model can", "no room for output"],
    )
    def test_warmup_refuses_lengths_that_can_not_be_kept(self, backend: Backend, limits: WarmupLimits) -> None:
        before = run(backend, [make_request(0, self.prompts[1])])
        with pytest.raises(CapacityError):
            backend.warmup(limits)
        after = run(backend, [make_request(0, self.prompts[1])])
        assert token_ids(after[RequestId(0)]) == token_ids(before[RequestId(0)]), "it serves as it did before"
        backend.warmup(WarmupLimits())

    def test_prompts_that_are_not_chunked_stay_within_a_step(self, backend: Backend) -> None:
        limits = WarmupLimits(max_prefill_tokens=30, may_chunk_prefill=False)
        assert backend.warmup(limits).max_input_tokens == 30

    def test_cold_and_closed_backends_refuse_work(self) -> None:
        backend = self.make_backend()
        with pytest.raises(UnavailableError):
            backend.add([make_request(0, self.prompts[0])])
        backend.warmup(WarmupLimits())
        backend.add([make_request(0, self.prompts[0])])
        backend.close()
        backend.close()
        with pytest.raises(UnavailableError):
            backend.add([make_request(0, self.prompts[0])])
