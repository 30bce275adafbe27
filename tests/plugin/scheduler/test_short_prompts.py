"""Short prompts behind a long one: they get their first token soon, no step gets shorter, and the long one goes on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.plugin.conformance.scheduler import SchedulerConformance
from pagedkv.plugin.conformance.scheduler_harness import SchedulerHarness

BUDGET = 64


class _Continuous(SchedulerConformance):
    scheduler_name = "continuous"


def make(share: float, **arguments: int) -> SchedulerHarness:
    """A harness whose scheduler leaves this share to short prompts."""
    return _Continuous().make_harness(max_step_tokens=BUDGET, short_prompt_share=share, **arguments)


def prompt(index: int, num_tokens: int) -> range:
    return range(10_000 * index, 10_000 * index + num_tokens)


def first_token_steps(harness: SchedulerHarness, lengths: list[int]) -> list[int]:
    """Adds prompts at once; for each, the number of steps until its first token. All run to their ends."""
    ids = [harness.add(prompt(index, length), 3) for index, length in enumerate(lengths)]
    found: dict[int, int] = {}
    num_steps = 0
    while harness.live:
        harness.step()
        num_steps += 1
        for id_ in ids:
            sequence = harness.live.get(id_) or harness.ended[id_]
            if sequence.num_generated_tokens:
                found.setdefault(id_, num_steps)
    harness.check_ended()
    return [found[id_] for id_ in ids]


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    lengths = [600, 10, 12, 8]
    assert first_token_steps(make(0.0, num_blocks=400), lengths)[1:] == [10, 10, 10]
    fair = first_token_steps(make(0.5, num_blocks=400), lengths)
    assert fair == [10, 1, 1, 1], "the long one loses no step: what it gives is less than a step"


def test_prompts_of_equal_length_stay_first_come_first_served() -> None:
    lengths = [128] * 4
    assert first_token_steps(make(0.5, num_blocks=400), lengths) == first_token_steps(
        make(0.0, num_blocks=400), lengths
    )


def test_a_stream_of_short_prompts_takes_its_share_and_no_more() -> None:
    harness = make(0.5, num_blocks=800, max_num_sequences=200)
    long = harness.add(prompt(0, 640), 2)
    for step in range(100):
        for index in range(4):
            harness.add(prompt(1 + 4 * step + index, 30), 1)
        plan = harness.step()
        (row,) = [row for row in plan.scheduled if row.id == long] or [None]
        if row is None or row.is_last_chunk:
            break
        assert row.num_tokens >= BUDGET // 2 - 4, "a row of each running stream goes before"
        assert plan.num_tokens == BUDGET
    assert step <= 2 * 640 // BUDGET + 1


def test_what_is_kept_and_not_used_goes_to_the_long_prompt() -> None:
    """The short one finds no room, so that its part of the step is the long one's after all."""
    harness = make(0.5, num_blocks=400, max_num_sequences=1)
    harness.add(prompt(0, 600), 2)
    harness.step()
    harness.add(prompt(1, 10), 2)
    plan = harness.step()
    assert [row.num_tokens for row in plan.scheduled] == [BUDGET]


def test_a_short_prompt_that_shares_the_long_one_s_beginning_still_waits_for_it() -> None:
    harness = make(0.5, num_blocks=400, block_size=16)
    harness.add(prompt(0, 600), 2)
    harness.step()
    child = harness.add([*prompt(0, 32), 7], 2)
    harness.drain()
    assert harness.ended[child].num_cached_tokens == 32
    harness.check_ended()


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=14),
    share=st.sampled_from([0.1, 0.5, 0.9]),
    num_blocks=st.integers(40, 200),
)
def test_every_step_is_as_full_as_without_and_all_end(
    arrivals: list[tuple[int, int, int]], share: float, num_blocks: int
) -> None:
    harness = make(share, num_blocks=num_blocks, block_size=8)
    for index, (gap, length, max_new_tokens) in enumerate(arrivals):
        harness.add(prompt(index, length), max_new_tokens)
        for _ in range(gap if harness.live else 0):
            plan = harness.step()
            cut = [row for row in plan.scheduled if not row.is_last_chunk]
            assert not cut or plan.num_tokens == BUDGET or plan.preempted or harness.cache.stats().num_free_blocks == 0
            if not harness.live:
                break
    harness.drain()
    harness.check_ended()
