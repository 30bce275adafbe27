"""The policy of the scheduler `continuous`: who goes first, how prompts are cut, what waits for what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedkv.plugin.conformance.scheduler_harness import SchedulerHarness, describe_plan
from pagedkv.plugin.errors import CapacityError, DuplicateRequestError, IntegrityError, RequestError
from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.scheduler import admission, growth
from pagedkv.plugin.scheduler.growth import num_tokens_grown
from pagedkv.plugin.step_plan import NewSequence, StepPlan

MakeHarness = Callable[..., SchedulerHarness]


def rows_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.id, row.start, row.num_tokens) for row in plan.scheduled]


def distinct_prompt(index: int, num_tokens: int) -> range:
    return range(10_000 * index, 10_000 * index + num_tokens)


def test_decodes_come_first_then_chunks_then_newcomers_oldest_first(make_harness: MakeHarness) -> None:
    harness = make_harness(max_step_tokens=10, short_prompt_share=0.0)
    for index, num_tokens in enumerate((3, 12, 2)):
        harness.add(distinct_prompt(index, num_tokens), 8)
    assert rows_of(harness.step()) == [(0, 0, 3), (1, 0, 7)]
    assert rows_of(harness.step()) == [(0, 3, 1), (1, 7, 5), (2, 0, 2)]
    assert rows_of(harness.step()) == [(0, 4, 1), (1, 12, 1), (2, 2, 1)]


def test_the_last_token_of_a_prompt_and_a_prompt_of_one_token_are_rows_with_one_token(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(max_step_tokens=8, short_prompt_share=0.0)
    for index, num_tokens in enumerate((9, 4, 1)):
        harness.add(distinct_prompt(index, num_tokens), 3)
    assert rows_of(harness.step()) == [(0, 0, 8)]
    assert rows_of(harness.step()) == [(0, 8, 1), (2, 0, 1), (1, 0, 4)]


def test_every_decode_gets_its_token_while_a_long_prompt_is_computed(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=200, max_step_tokens=12)
    streams = [harness.add(distinct_prompt(index, 3), 60) for index in range(4)]
    while any(harness.live[id_].num_generated_tokens == 0 for id_ in streams):
        harness.step()
    long = harness.add(distinct_prompt(9, 300), 2)
    num_steps = 0
    while harness.live[long].num_generated_tokens == 0:
        plan = harness.step()
        assert [row.id for row in plan.scheduled] == [*streams, long]
        assert plan.num_tokens <= 12
        num_steps += 1
    assert num_steps == -(-300 // 8), "the prompt takes what the decodes leave"


def test_more_sequences_than_a_step_has_tokens_run_in_turn(make_harness: MakeHarness) -> None:
    harness = make_harness(max_step_tokens=2, max_num_sequences=8)
    for index in range(4):
        harness.add(distinct_prompt(index, 5), 4)
    harness.drain()
    harness.check_ended()


def test_a_request_of_one_block_more_than_the_pool_is_refused_and_the_pool_itself_is_usable(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(num_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match=r"12 prompt tokens and max_new_tokens 6 .* 17 tokens.* holds 16"):
        harness.add(range(12), 6)
    assert harness.scheduler.stats().num_waiting == 0
    for max_new_tokens in (5, 4):
        harness.add(distinct_prompt(max_new_tokens, 12), max_new_tokens)
        assert harness.drain() == max_new_tokens, "one step for the prompt, one for each further token"
    harness.check_ended()


def test_a_preempted_sequence_computes_only_what_is_no_longer_cached(make_harness: MakeHarness) -> None:
    """465 known tokens, 256 of them still cached at the readmission: 209 are scheduled, none past the end."""
    harness = make_harness(num_blocks=32, block_size=16, max_step_tokens=512)
    growing = harness.add(distinct_prompt(0, 1), 256)
    victim = harness.add(distinct_prompt(1, 464), 3)
    harness.step()
    preempted: list[int] = []
    while growing in harness.live:
        preempted += harness.step(only=[growing]).preempted
    assert preempted == [victim]
    assert rows_of(harness.step()) == [(victim, 256, 209)]
    harness.drain()
    harness.check_ended()
    assert harness.scheduler.stats().recomputed_tokens == 464 - 256


def test_the_newest_is_preempted_and_is_admitted_again_before_later_ones(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=10, block_size=4)
    _, _, newest = (harness.add(distinct_prompt(index, 5), 14) for index in range(3))
    plan = harness.step()
    while not plan.preempted:
        plan = harness.step()
    assert plan.preempted == (newest,)
    late = harness.add(distinct_prompt(9, 2), 2)
    while not harness.live[newest].has_blocks:
        assert not harness.live[late].has_blocks
        harness.step()
    harness.drain()
    harness.check_ended()
    assert harness.scheduler.stats().preemptions == sum(s.num_preemptions for s in harness.ended.values())


def test_a_sequence_preempted_in_a_step_that_it_was_part_of_leaves_it_with_its_budget(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(num_blocks=17, block_size=4, max_step_tokens=8)
    oldest = harness.add(distinct_prompt(0, 40), 2)
    harness.step(only=[oldest])
    middle = harness.add(distinct_prompt(1, 12), 2)
    harness.step(only=[middle])
    newest = harness.add(distinct_prompt(2, 1), 60)
    while harness.cache.stats().num_free_blocks > 1:
        assert harness.step(only=[newest]).scheduled
    assert harness.live[newest].num_computed_tokens % 4 > 0, "its own next token needs no block"
    plan = harness.step()
    assert plan.preempted == (newest,)
    # The budget of 8 was 1 for the newest, then 7 for the oldest; the 1 that came back went to the middle one.
    assert rows_of(plan) == [(middle, 8, 1), (oldest, 8, 7)]
    harness.drain()
    harness.check_ended()


def test_total_work_and_preemptions_stay_bounded_when_the_pool_is_almost_full_of_decodes(
    make_harness: MakeHarness,
) -> None:
    """A long prompt arrives, larger than the step budget, while decodes fill the pool."""

    def run(num_blocks: int) -> SchedulerHarness:
        harness = make_harness(num_blocks=num_blocks, block_size=4, max_step_tokens=24)
        for index in range(12):
            harness.add(distinct_prompt(index, 8), 40)
        for _ in range(10):
            harness.step()
        harness.add(distinct_prompt(99, 96), 20)
        for index in range(12, 18):
            harness.add(distinct_prompt(index, 8), 40)
        harness.drain()
        harness.check_ended()
        return harness

    unpressured, pressured = run(1000), run(40)
    stats = pressured.scheduler.stats()
    assert unpressured.scheduler.stats().preemptions == 0
    assert stats.preemptions > 0, "the pool is small enough to matter"
    assert max(sequence.num_preemptions for sequence in pressured.ended.values()) <= 3
    assert pressured.num_computed_tokens <= 1.3 * unpressured.num_computed_tokens
    assert stats.recomputed_tokens >= pressured.num_computed_tokens - unpressured.num_computed_tokens


def test_a_short_prompt_in_chunks_of_four_keeps_every_block_accounted_for(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=60, block_size=4, max_step_tokens=4)
    id_ = harness.add(range(18), 200)
    while harness.live:
        harness.step()
        stats = harness.cache.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks == 60
    assert len(harness.ended[id_].token_ids) == 218
    harness.check_ended()


@pytest.mark.parametrize("state", ["queued", "in mid-prompt", "decoding", "preempted"])
def test_a_cancelled_sequence_gives_its_blocks_back_at_once(make_harness: MakeHarness, state: str) -> None:
    harness = make_harness(num_blocks=12, block_size=4, max_step_tokens=10)
    older = harness.add(distinct_prompt(0, 5), 36)
    harness.step()
    cancelled = harness.add(distinct_prompt(1, 13), 30)
    sequence = harness.live[cancelled]
    has_arrived = {
        "queued": lambda: True,
        "in mid-prompt": lambda: 0 < sequence.num_computed_tokens < 13,
        "decoding": lambda: sequence.num_generated_tokens == 3,
        "preempted": lambda: sequence.num_preemptions == 1,
    }[state]
    while not has_arrived():
        assert cancelled in harness.live
        harness.step()
    harness.abort([cancelled])
    assert harness.cache.stats().num_used_blocks == len(harness.cache.block_table(older))
    assert (harness.scheduler.stats().num_running, harness.scheduler.stats().num_waiting) == (1, 0)
    harness.add(distinct_prompt(1, 13), 12)
    harness.drain()
    harness.check_ended()


def test_many_requests_with_one_prefix_sent_at_once_compute_it_once(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=400, block_size=4, max_step_tokens=64, max_num_sequences=64)
    prefix = list(range(100))
    for index in range(32):
        harness.add([*prefix, *distinct_prompt(index + 1, 3)], 4)
    harness.drain()
    harness.check_ended()
    num_saved_tokens = sum(sequence.num_cached_tokens or 0 for sequence in harness.ended.values())
    assert num_saved_tokens == 31 * 100
    assert harness.num_computed_tokens == 100 + 32 * (3 + 3)


def test_waiting_for_a_prefix_lets_others_go_first_and_ends_when_the_one_computing_it_is_cancelled(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(max_step_tokens=16, short_prompt_share=0.0)
    filler = harness.add(range(16), 4)
    harness.step()
    filler = harness.add(range(100, 140), 4)
    same = harness.add(range(100, 140), 4)
    other = harness.add(distinct_prompt(1, 2), 4)
    assert [row.id for row in harness.step().scheduled] == [0, filler]
    harness.step()
    plan = harness.step()
    assert same not in [row.id for row in plan.scheduled]
    assert {filler, other} <= {row.id for row in plan.scheduled}
    harness.abort([filler])
    plan = harness.step()
    assert same in [row.id for row in plan.scheduled]
    harness.drain()
    harness.check_ended()


def test_without_room_for_the_first_in_the_queue_nobody_behind_it_overtakes(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=10, block_size=4, max_step_tokens=64)
    running = harness.add(distinct_prompt(0, 20), 8)
    harness.step()
    large = harness.add(distinct_prompt(1, 30), 4)
    small = harness.add(distinct_prompt(2, 2), 2)
    while running in harness.live:
        assert [row.id for row in harness.step().scheduled] == [running]
    plan = harness.step()
    assert large in [row.id for row in plan.scheduled]
    harness.drain()
    assert small in harness.ended
    harness.check_ended()


def test_a_prompt_waits_when_only_used_blocks_are_left_and_evicts_when_only_cached_ones_are(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(num_blocks=8, block_size=4, max_step_tokens=64)
    harness.add(distinct_prompt(0, 30), 2)
    harness.drain()
    assert harness.cache.stats().num_cached_blocks == 7
    harness.add(distinct_prompt(1, 30), 2)
    assert harness.drain() == 2
    assert harness.cache.stats().evictions >= 6
    harness.check_ended()


def test_samples_of_one_prompt_added_together_compute_it_once_and_copy_the_block_they_write(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(block_size=4, max_step_tokens=16)
    parent = harness.add(range(30), 8)
    children = [harness.add(range(30), 8, parent_id=parent) for _ in range(3)]
    copies = []
    while harness.live:
        copies += harness.step().copies
    assert [harness.ended[id_].num_cached_tokens for id_ in children] == [29, 29, 29]
    assert harness.num_computed_tokens == 30 + 3 * 1 + 4 * 7
    assert len(copies) == 3, "each child writes into the block of the prompt's end, which the parent keeps"
    assert len({copy.source for copy in copies}) == 1
    harness.check_ended()


def test_forks_without_a_prefix_cache_need_no_room_for_what_they_share(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=14, block_size=4, max_step_tokens=64, has_prefix_cache=False)
    parent = harness.add(range(38), 6)
    child = harness.add(range(38), 6, parent_id=parent)
    harness.step()
    assert [row.id for row in harness.step().scheduled] == [parent, child]
    harness.drain()
    assert harness.ended[child].num_cached_tokens == 37
    harness.check_ended()


def test_a_fork_into_another_salt_shares_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness()
    parent = harness.add(range(22), 8, namespace=CacheNamespace("one"))
    harness.step()
    child = harness.add(range(22), 8, namespace=CacheNamespace("other"), parent_id=parent)
    harness.drain()
    assert harness.ended[child].num_cached_tokens == 0
    harness.check_ended()


def test_an_id_used_again_is_no_parent(make_harness: MakeHarness) -> None:
    """The parent ends before its child is admitted, and another sequence of another salt takes its id."""
    harness = make_harness(has_prefix_cache=False)
    parent = harness.add(range(22), 8)
    harness.step()
    child = harness.add(range(22), 4, parent_id=parent)
    harness.abort([parent])
    next_id, harness._num_ids = harness._num_ids, parent
    assert harness.add(range(22), 8, namespace=CacheNamespace("other")) == parent
    harness._num_ids = next_id
    while not harness.live[parent].num_generated_tokens:
        harness.step(only=[parent])
    harness.drain()
    assert harness.ended[child].num_cached_tokens == 0
    harness.check_ended()


def test_a_burst_costs_each_admission_alone_not_a_walk_over_all_that_run(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = []

    def count(*arguments: object) -> int:
        grown.append(arguments)
        return num_tokens_grown(*arguments)  # type: ignore[arg-type]

    for module in (admission, growth):
        monkeypatch.setattr(module, "num_tokens_grown", count)
    harness = make_harness(num_blocks=1000, max_step_tokens=1000, max_num_sequences=100)
    for index in range(100):
        harness.add(distinct_prompt(index, 3), 2)
    assert len(harness.step().scheduled) == 100
    assert len(grown) <= 300


def test_a_preempted_sequence_may_hit_its_own_prompt_once_that_was_computed(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=12, block_size=4)
    harness.add(distinct_prompt(0, 9), 30)
    victim = harness.add(distinct_prompt(1, 13), 16, may_reuse_prefix=False)
    while not (harness.live[victim].num_preemptions and harness.live[victim].has_blocks):
        plan = harness.step()
    row = next(row for row in plan.scheduled if row.id == victim)
    assert row.start > 0
    assert row.num_cached_tokens == 0, "what is reported stays what the first admission found"
    harness.drain()
    harness.check_ended()


def test_outside_only_a_newer_sequence_can_be_preempted_and_an_older_one_never_is(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=10, block_size=4, max_step_tokens=64)
    older = harness.add(distinct_prompt(0, 14), 20)
    newer = harness.add(distinct_prompt(1, 14), 20)
    harness.step()
    assert harness.live[newer].has_blocks
    preempted: list[int] = []
    while harness.live[newer].num_generated_tokens < 19 and not preempted:
        plan = harness.step(only=[newer])
        if not plan.scheduled:
            break
        preempted += plan.preempted
    assert not preempted, "the newer one stands still instead"
    while harness.live.get(older) and not preempted:
        preempted += harness.step(only=[older]).preempted
    assert preempted == [newer]
    harness.drain()
    harness.check_ended()


def test_equal_calls_give_equal_plans_whatever_the_order_of_a_set(make_harness: MakeHarness) -> None:
    def run(order: int) -> list[object]:
        harness = make_harness(num_blocks=14, block_size=4, max_step_tokens=12)
        for index in range(8):
            harness.add(distinct_prompt(index % 3, 7 + index % 2), 9)
        plans: list[object] = []
        for step in range(12):
            plans.append(describe_plan(harness.schedule()))
            harness.finish_step()
            if step == 5:
                harness.abort([RequestId(1), RequestId(4), RequestId(2)][::order])
        harness.drain()
        return plans

    assert run(1) == run(-1)


def test_wrong_calls_are_refused_and_change_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness()
    scheduler = harness.scheduler
    id_ = harness.add(range(6), 3)
    with pytest.raises(DuplicateRequestError):
        scheduler.add(NewSequence(id_, (1, 2), 3, CacheNamespace()))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(NewSequence(RequestId(7), (), 3, CacheNamespace()))
    plan = harness.schedule()
    with pytest.raises(IntegrityError, match="neither committed nor failed"):
        scheduler.schedule()
    with pytest.raises(IntegrityError, match="neither committed nor failed"):
        scheduler.abort([id_])
    with pytest.raises(IntegrityError, match=f"sequence {id_} samples"):
        scheduler.commit(plan, [])
    with pytest.raises(IntegrityError, match="not all of them"):
        scheduler.commit(plan, [id_, RequestId(8)])
    harness.finish_step()
    with pytest.raises(IntegrityError, match="not open"):
        scheduler.commit(plan, [])
    with pytest.raises(IntegrityError, match="not open"):
        scheduler.fail(plan)
    harness.drain()
    harness.check_ended()
