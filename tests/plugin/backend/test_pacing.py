"""A bound on the time between two tokens of a running stream, on a clock that the model's work moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.plugin.attention_metadata import AttentionContext
from pagedkv.plugin.backend.pacing import MIN_CHUNK_TOKENS, ChunkPacer, StepPacer
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.requests import Request, RequestId, SamplingParams

MakeBackend = Callable[..., PagedBackend]
MAX_GAP_S = 0.04
STEP_S, TOKEN_S, PAIR_S = 0.004, 0.0001, 2e-9


class Clock:
    """Stands still but for the work that is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def forward(self, batch: ModelInput, attention: AttentionContext) -> None:
        """A step's time, of which attention grows with the context."""
        num_pairs = int((batch.positions + 1).sum())
        self.now += STEP_S + TOKEN_S * len(batch.token_ids) + PAIR_S * num_pairs


def run(backend: PagedBackend, clock: Clock, long_prompt: list[int]) -> tuple[list[float], list[int], int]:
    """One stream, and in its middle a long prompt: the stream's gaps and tokens, and steps to the prompt's first."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    backend.add([Request(RequestId(1), [5, 6, 7], params)])
    times: list[float] = []
    tokens: list[int] = []
    num_steps = steps_to_first = 0
    has_come = False
    while backend.has_unfinished():
        if len(tokens) == 20 and not has_come:
            has_come = True
            backend.add([Request(RequestId(2), long_prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))])
        for output in backend.step():
            if output.request_id == 1:
                times.append(clock.now)
                tokens.append(output.token.token_id)
            elif not steps_to_first:
                steps_to_first = num_steps
        num_steps += has_come
    return [after - before for before, after in itertools.pairwise(times)], tokens, steps_to_first


@pytest.fixture
def clock(token_model: TokenModel, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, forward = Clock(), token_model.forward

    def timed(batch: ModelInput, attention: AttentionContext) -> object:
        clock.forward(batch, attention)
        return forward(batch, attention)

    monkeypatch.setattr(token_model, "forward", timed)
    return clock


def test_s28_a_streams_gaps_stay_under_the_bound_while_a_long_prompt_arrives(
    make_backend: MakeBackend, clock: Clock
) -> None:
    prompt = [token % 90 + 1 for token in range(6000)]
    unbounded = run(make_backend(), clock, prompt)
    assert max(unbounded[0]) > 3 * MAX_GAP_S

    backend = make_backend(scheduler__max_gap_ms=MAX_GAP_S * 1000)
    backend._pacer = StepPacer(MAX_GAP_S, clock)
    gaps, tokens, steps_to_first = run(backend, clock, prompt)
    assert max(gaps) <= MAX_GAP_S
    assert tokens == unbounded[1]
    # The machine is put to use all the same: chunks fill more than half of the bound.
    assert steps_to_first * MAX_GAP_S * 0.5 < 6000 * (TOKEN_S + PAIR_S * 6000)


def test_a_bound_of_which_streams_leave_a_third_keeps_a_third_of_their_rate(
    make_backend: MakeBackend, clock: Clock
) -> None:
    solo_s = STEP_S + TOKEN_S
    backend = make_backend(scheduler__max_gap_ms=1)
    backend._pacer = StepPacer(3 * solo_s, clock)
    gaps, _, _ = run(backend, clock, [token % 90 + 1 for token in range(1500)])
    assert len(gaps) / sum(gaps) >= 0.3 / solo_s


def test_prompts_go_on_where_no_bound_can_hold(make_backend: MakeBackend, clock: Clock) -> None:
    backend = make_backend(scheduler__max_gap_ms=1)
    backend._pacer = StepPacer(1e-6, clock)
    _, tokens, steps_to_first = run(backend, clock, [token % 90 + 1 for token in range(1500)])
    assert len(tokens) == 200
    assert steps_to_first <= 1500 / MIN_CHUNK_TOKENS + 2


def test_nothing_is_bound_where_no_stream_runs_or_takes_part(make_backend: MakeBackend, clock: Clock) -> None:
    backend = make_backend(scheduler__max_gap_ms=10)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    backend.add([Request(RequestId(1), list(range(1, 90)) * 4, params)])
    assert backend.schedule().num_tokens == 356
    backend._require_pool().scheduler.fail(backend._require_pool().scheduler._open_plan)
    backend._sequences.clear()

    backend.add([Request(RequestId(1), [4, 5], params)])
    backend.step()
    backend.add([Request(RequestId(2), list(range(1, 90)) * 4, params)])
    plan = backend.schedule(only=[RequestId(2)])
    assert plan.num_tokens == 356
    backend.commit(plan, backend.execute(plan))
    backend.abort([RequestId(1), RequestId(2)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000), st.floats(0, 10)), max_size=30))
def test_a_pacer_always_lets_prompts_go_on_and_never_more_than_doubles(steps: list[tuple[int, int, float]]) -> None:
    pacer = ChunkPacer(0.1)
    for num_streams, num_chunk_tokens, seconds in steps:
        pacer.note(num_streams, num_chunk_tokens, seconds)
        assert pacer.max_chunk_tokens >= MIN_CHUNK_TOKENS
        if num_chunk_tokens and seconds:
            assert pacer.max_chunk_tokens <= max(2 * MIN_CHUNK_TOKENS, 2 * num_chunk_tokens)
