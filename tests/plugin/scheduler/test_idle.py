"""Sequences that nobody asks for any more give their blocks to those that lack room, and are not lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.plugin.conformance.scheduler import SchedulerConformance
from pagedkv.plugin.conformance.scheduler_harness import SchedulerHarness
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.scheduler.idle import MAX_STEPS_IN_VAIN

MakeHarness = Callable[..., SchedulerHarness]
NUM_BLOCKS, BLOCK_SIZE = 8, 4


class Continuous(SchedulerConformance):
    __test__ = False
    scheduler_name = "continuous"


@pytest.fixture
def harness(make_harness: MakeHarness) -> SchedulerHarness:
    return make_harness(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=64)


def distinct_prompt(index: int, num_tokens: int) -> range:
    return range(100 * index, 100 * index + num_tokens)


def add(harness: SchedulerHarness, index: int, num_tokens: int, max_new_tokens: int) -> RequestId:
    return harness.add(distinct_prompt(index, num_tokens), max_new_tokens)


def steps_until_a_row(harness: SchedulerHarness, id_: RequestId) -> int:
    for num_steps in range(1, 4 * MAX_STEPS_IN_VAIN):
        if harness.step(only=[id_]).scheduled:
            return num_steps
    raise AssertionError("it waits for ever")


def test_a_waiting_sequence_gets_the_room_of_an_idle_one(harness):
    dead = add(harness, 0, NUM_BLOCKS * BLOCK_SIZE - 2, 3)
    harness.step()
    young = add(harness, 1, 6, 4)
    assert steps_until_a_row(harness, young) == MAX_STEPS_IN_VAIN
    assert harness.live[dead].num_preemptions == 1
    while young in harness.live:
        harness.step(only=[young])
    assert dead in harness.live
    harness.drain()
    harness.check_ended()


def test_a_running_sequence_that_older_idle_ones_leave_no_room_grows_at_last(make_harness):
    harness = make_harness(num_blocks=NUM_BLOCKS + 1, block_size=BLOCK_SIZE, max_step_tokens=64)
    dead = [add(harness, index, 7, 20) for index in range(2)]
    young = add(harness, 2, 5, 20)
    harness.step()
    while harness.step(only=[young]).scheduled:
        assert young in harness.live, "the pool should be full before its end"
    assert steps_until_a_row(harness, young) < MAX_STEPS_IN_VAIN
    assert [harness.live[id_].num_preemptions for id_ in dead] == [0, 1], "only as many as needed, newest first"
    while young in harness.live:
        assert harness.step(only=[young]).scheduled
    harness.drain()
    harness.check_ended()


def test_idle_ones_do_not_keep_others_from_running_by_their_number(make_harness):
    harness = make_harness(num_blocks=64, block_size=BLOCK_SIZE, max_num_sequences=2)
    dead = [add(harness, index, 3, 10) for index in range(2)]
    harness.step()
    young = add(harness, 2, 3, 4)
    assert steps_until_a_row(harness, young) == MAX_STEPS_IN_VAIN
    assert sum(harness.live[id_].num_preemptions for id_ in dead) == 1
    harness.drain()
    harness.check_ended()


def test_one_that_died_while_others_waited_is_found_too(harness):
    dead = add(harness, 0, NUM_BLOCKS * BLOCK_SIZE - 2, 3)
    harness.step()
    young = add(harness, 1, 6, 4)
    harness.step(only=[young])
    harness.step(only=[dead])
    assert steps_until_a_row(harness, young) <= 2 * MAX_STEPS_IN_VAIN


def test_an_idle_one_that_is_asked_for_again_is_idle_no_longer(harness):
    first = add(harness, 0, 14, 3)
    harness.step()
    harness.step(only=[first])
    young = add(harness, 1, NUM_BLOCKS * BLOCK_SIZE - 2, 2)
    for _ in range(MAX_STEPS_IN_VAIN - 1):
        assert not harness.step(only=[young]).scheduled
    assert [row.id for row in harness.step(only=[first]).scheduled] == [first]
    assert not harness.live.get(first), "it had one token to go"
    assert harness.step(only=[young]).scheduled


def test_clients_that_take_turns_are_never_idle(make_harness):
    """However many there are, and although those without room ask as often as the others."""
    num_clients = 3 * MAX_STEPS_IN_VAIN
    harness = make_harness(num_blocks=20, block_size=BLOCK_SIZE, max_step_tokens=256)
    ids = [add(harness, index, 3, 4) for index in range(num_clients)]
    while harness.live:
        for id_ in ids:
            if id_ in harness.live:
                harness.step(only=[id_])
    harness.check_ended()
    assert harness.scheduler.stats().preemptions == 0


@given(data=st.data())
def test_whatever_clients_do_all_replicas_agree_and_every_output_is_right(data):
    harness = Continuous().make_harness(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=16, max_num_sequences=3, num_replicas=2
    )
    for index in range(data.draw(st.integers(2, 5))):
        add(harness, index, data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16)))
    for _ in range(data.draw(st.integers(1, 4))):
        only = data.draw(st.sets(st.sampled_from(range(5)), min_size=1))
        for _ in range(data.draw(st.sampled_from([1, 3, MAX_STEPS_IN_VAIN, 2 * MAX_STEPS_IN_VAIN]))):
            harness.step(only=[RequestId(id_) for id_ in only])
    harness.drain()
    harness.check_ended()
