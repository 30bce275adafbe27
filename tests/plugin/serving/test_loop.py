"""The serving loop over the paged backend: whatever comes and goes, tokens are those of each request alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.errors import (
    CapacityError,
    OverloadedError,
    PagedKVError,
    RequestError,
    UnavailableError,
    UnsupportedRequestError,
)
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.requests import Request, RequestId, SamplingParams, StepOutput
from pagedkv.plugin.resolved_config import resolve_config
from pagedkv.plugin.serving.generation import GenerationRequest, Sample
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.step_thread import StepThread
from pagedkv.plugin.serving.thread_inbox import ThreadInbox

TIMEOUT_S = 60
NUM_BLOCKS = 12


class Inbox:
    """Keeps what comes, by sample."""

    is_full = False

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()
        self.errors: dict[RequestId, PagedKVError] = {}

    def deliver(self, outputs: list[tuple[Sample, StepOutput]]) -> None:
        with self.changed:
            for sample, output in outputs:
                assert sample.request.id not in self.ended
                self.tokens.setdefault(sample.request.id, []).append(output.token.token_id)
                if output.finish_reason:
                    self.ended.add(sample.request.id)
            self.changed.notify_all()

    def fail(self, samples: Sequence[Sample], error: PagedKVError) -> None:
        with self.changed:
            for sample in samples:
                self.errors[sample.request.id] = error
            self.changed.notify_all()

    def wait_for(self, samples: Sequence[Sample]) -> None:
        ids = {sample.request.id for sample in samples}
        with self.changed:
            assert self.changed.wait_for(lambda: ids <= self.ended | self.errors.keys(), TIMEOUT_S)


class Setup:
    def __init__(self) -> None:
        self.model = TokenModel()
        written = {
            "model": {"path": "none"},
            "cache": {"num_blocks": NUM_BLOCKS, "block_size": 8},
            "scheduler": {"max_step_tokens": 32, "max_num_sequences": 4},
        }
        config = resolve_config(parse_config(written), self.model.spec)
        self.backend = PagedBackend(config, self.model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))
        self.thread = StepThread()
        self.thread.run(lambda: self.backend.warmup(WarmupLimits()))
        self.loop = ServingLoop(self.backend, self.thread, is_shared=True, max_live_samples=16)
        self.inbox = Inbox()

    def start(self, prompt_ids: Sequence[int], max_new_tokens: int, n: int = 1) -> list[Sample]:
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, n=n)
        return self.loop.start(GenerationRequest(prompt_ids, params), self.inbox).result(TIMEOUT_S)

    def require_empty(self) -> None:
        self.thread.run(self.backend.check_integrity)
        assert self.thread.run(self.backend.stats).num_used_blocks == 0
        assert self.loop.num_live == 0

    def close(self) -> None:
        self.loop.close()
        self.thread.run(self.backend.close)
        self.thread.close()


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.require_empty()
    made.close()


ACTIONS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 3), st.booleans()), min_size=1, max_size=5
)


@settings(max_examples=15)
@given(ACTIONS)
def test_what_is_not_aborted_gets_its_own_tokens_and_nothing_is_left(setup: Setup, actions) -> None:
    started = []
    for length, max_new_tokens, n, is_aborted in actions:
        prompt = [1 + (7 * length + i) % 90 for i in range(length)]
        samples = setup.start(prompt, max_new_tokens, n)
        if is_aborted:
            setup.loop.abort(samples[: len(samples) // 2 + 1])
        started.append((prompt, max_new_tokens, samples, samples[len(samples) // 2 + 1 :] if is_aborted else samples))
    for prompt, max_new_tokens, _, kept in started:
        setup.inbox.wait_for(kept)
        for sample in kept:
            assert setup.inbox.tokens[sample.request.id] == setup.model.continue_greedily(prompt, max_new_tokens)
    setup.thread.run(lambda: None)
    setup.require_empty()


def test_requests_of_another_door_are_left_alone(setup: Setup) -> None:
    """They are stepped by whoever added them, also where they hold room that the loop's requests wait for."""
    other = Request(RequestId(5), list(range(1, 72)), SamplingParams(max_new_tokens=20, ignore_eos=True))

    def begin() -> list[StepOutput]:
        setup.backend.add([other])
        outputs = []
        while not outputs:
            outputs = setup.backend.step(only=[other.id])
        return outputs

    assert len(setup.thread.run(begin)) == 1
    samples = setup.start(list(range(1, 60)), 30)
    num_tokens = 1
    while setup.thread.run(lambda: setup.backend.step(only=[other.id])):
        num_tokens += 1
        if num_tokens == 20:
            break
    assert num_tokens == 20
    setup.inbox.wait_for(samples)
    setup.require_empty()


def test_what_can_not_be_taken_is_refused_at_the_start(setup: Setup) -> None:
    with pytest.raises(RequestError):
        setup.start([500], 4)
    with pytest.raises(CapacityError):
        setup.start([1] * 90, 90)
    running = setup.start([1, 2, 3], 80, n=2)
    with pytest.raises(OverloadedError):
        setup.start([1], 1, n=15)
    setup.loop.abort(running)
    setup.thread.run(lambda: None)
    setup.require_empty()


def test_a_loop_that_ends_says_so_to_whom_it_serves() -> None:
    setup = Setup()
    samples = setup.start([1, 2, 3], 80, n=2)
    setup.loop.begin_drain()
    with pytest.raises(UnavailableError):
        setup.start([1], 1)
    setup.loop.close()
    setup.inbox.wait_for(samples)
    assert all(isinstance(setup.inbox.errors[sample.request.id], UnavailableError) for sample in samples)
    setup.require_empty()
    setup.close()


def test_a_parameter_that_the_backend_does_not_know_is_refused_alone(setup: Setup, monkeypatch) -> None:
    monkeypatch.setattr(setup.loop, "_understood", frozenset({"min_p"}))
    for params in (SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=2, min_p=0.5)):
        samples = setup.loop.start(GenerationRequest([1, 2], params), setup.inbox).result(TIMEOUT_S)
        setup.loop.abort(samples)
    with pytest.raises(UnsupportedRequestError, match="does not know output_penalties"):
        setup.loop.start(
            GenerationRequest([1, 2], SamplingParams(max_new_tokens=2, presence_penalty=1.0)), setup.inbox
        ).result(TIMEOUT_S)


def test_prompts_that_came_during_a_step_are_all_in_the_next(setup: Setup) -> None:
    blocked, go_on = threading.Event(), threading.Event()
    setup.loop.run_on_thread(lambda: (blocked.set(), go_on.wait(TIMEOUT_S)))
    assert blocked.wait(TIMEOUT_S)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    inbox = ThreadInbox()
    futures = [setup.loop.start(GenerationRequest([5 + index], params), inbox) for index in range(4)]
    go_on.set()
    assert all(future.result(TIMEOUT_S) for future in futures)
    assert [len(inbox.read(TIMEOUT_S)) for _ in range(2)] == [4, 4]
