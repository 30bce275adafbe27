"""Conformance suite for `Scheduler` plugins, in pytest. It loads the plugin by its registered name.

A plugin author's test file:

    from pagedkv.plugin.conformance.scheduler import SchedulerConformance

    class TestMyScheduler(SchedulerConformance):
        scheduler_name = "mine"                        # as in [project.entry-points."pagedkv.schedulers"]
        cache_manager_name = "paged"                   # default

pytest runs it like any test class; `pytest` and `hypothesis` must be installed. The suite does not test the policy
(which sequence runs first, which is preempted), only what every policy must do: each sequence ends with exactly the
tokens that it has alone, the budget is kept, blocks are released, and equal calls give equal plans. `SchedulerHarness`
checks this at every step.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv.plugin.conformance.scheduler_harness import SchedulerHarness
from pagedkv.plugin.errors import CapacityError, PagedKVError
from pagedkv.plugin.interface import CacheManager, Scheduler
from pagedkv.plugin.registry import CACHE_MANAGERS, SCHEDULERS, load_plugin
from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.resolved_config import SchedulerSettings


class SchedulerConformance:
    """The suite. Subclass it and set `scheduler_name`."""

    scheduler_name: ClassVar[str]
    cache_manager_name: ClassVar[str] = "paged"

    def make_harness(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_step_tokens: int = 32,
        max_num_sequences: int = 16,
        num_replicas: int = 1,
        vocab_size: int = 1000,
        has_prefix_cache: bool = True,
        short_prompt_share: float = 0.5,
    ) -> SchedulerHarness:
        """Makes the scheduler under test, over a new cache."""
        settings = SchedulerSettings(
            self.scheduler_name,
            max_step_tokens,
            max_num_sequences,
            block_size,
            short_prompt_share=short_prompt_share,
        )

        def make_replica() -> tuple[Scheduler, CacheManager]:
            cache = load_plugin(CACHE_MANAGERS, self.cache_manager_name).create(
                num_blocks, block_size, has_prefix_cache=has_prefix_cache
            )
            scheduler = load_plugin(SCHEDULERS, self.scheduler_name).create(settings, cache, num_blocks * block_size)
            return scheduler, cache

        return SchedulerHarness(make_replica, settings, num_replicas, vocab_size)

    def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(self) -> None:
        harness = self.make_harness(max_step_tokens=16)
        harness.add(range(50), 3)
        harness.drain()
        harness.check_ended()
        assert harness.num_computed_tokens == 50 + 2, "the last generated token is never computed"

    def test_a_bound_on_prompts_tokens_leaves_decodes_alone(self) -> None:
        harness = self.make_harness(max_step_tokens=32)
        decodes = [harness.add(range(start, start + 9), 20) for start in (0, 100, 200)]
        while any(harness.live[id_].num_generated_tokens < 1 for id_ in decodes):
            harness.step()
        prompts = [harness.add(range(start, start + 11), 2) for start in (300, 400)]
        lengths = []
        while any(harness.live[id_].num_generated_tokens < 1 for id_ in prompts if id_ in harness.live):
            plan = harness.schedule(max_chunk_tokens=5)
            assert {row.id for row in plan.scheduled} >= set(decodes)
            lengths.append(sum(row.num_tokens for row in plan.scheduled if row.id in prompts))
            harness.finish_step()
        assert sum(lengths[:5]) >= 22
        harness.drain()
        harness.check_ended()

    def test_one_request_in_a_cache_of_exactly_its_need(self) -> None:
        harness = self.make_harness(num_blocks=5, block_size=4)
        harness.add(range(12), 9)
        harness.drain()
        harness.check_ended()

    def test_more_than_the_cache_can_ever_hold_is_refused_at_once_and_the_next_one_runs(self) -> None:
        harness = self.make_harness(num_blocks=5, block_size=4)
        with pytest.raises(CapacityError, match="20"):
            harness.add(range(12), 10)
        with pytest.raises(CapacityError):
            harness.add(range(24), 1)
        harness.add(range(4), 2)
        assert harness.drain() == 2
        harness.check_ended()

    @pytest.mark.parametrize("has_prefix_cache", [True, False])
    def test_long_outputs_of_many_sequences_in_a_tenth_of_the_blocks_they_need(self, has_prefix_cache: bool) -> None:
        harness = self.make_harness(num_blocks=32, max_step_tokens=16, has_prefix_cache=has_prefix_cache)
        for index in range(32):
            harness.add(range(100 * index, 100 * index + 3 + index % 9), 30 + index % 5)
        harness.drain()
        harness.check_ended()

    def test_a_sequence_dropped_before_its_prefill_ran_leaves_nothing_to_hit(self) -> None:
        harness = self.make_harness()
        prompt = range(20)
        harness.add(prompt, 2)
        harness.schedule()
        harness.fail()
        dropped_again = harness.add(prompt, 2)
        harness.abort([dropped_again])
        missing = harness.add(prompt, 2)
        harness.drain()
        assert harness.ended[missing].num_cached_tokens == 0
        hitting = harness.add(prompt, 2)
        harness.drain()
        assert harness.ended[hitting].num_cached_tokens == 16
        harness.check_ended()

    def test_a_failed_step_releases_its_sequences_and_no_other(self) -> None:
        harness = self.make_harness(max_step_tokens=8)
        failing = harness.add(range(20), 5)
        waiting = harness.add(range(100, 120), 5)
        plan = harness.schedule(only=[failing])
        assert [row.id for row in plan.scheduled] == [failing]
        harness.fail()
        harness.drain()
        assert list(harness.ended) == [waiting]
        harness.check_ended()

    def test_cancelled_while_queued_in_mid_prompt_and_decoding(self) -> None:
        harness = self.make_harness(num_blocks=9, max_step_tokens=12)
        decoding, in_mid_prompt, queued = (harness.add(range(start, start + 13), 12) for start in (0, 100, 200))
        while harness.live[decoding].num_generated_tokens < 2:
            harness.step()
        harness.abort([queued, decoding])
        harness.abort([in_mid_prompt])
        assert harness.cache.stats().num_used_blocks == 0
        again = [harness.add(range(start, start + 13), 12) for start in (0, 100, 200)]
        harness.drain()
        assert set(harness.ended) == set(again)
        harness.check_ended()

    def test_unknown_ids_are_ignored_by_abort(self) -> None:
        harness = self.make_harness()
        harness.add(range(5), 2)
        for scheduler, _ in harness.replicas:
            scheduler.abort([RequestId(99)])
        harness.drain()
        harness.check_ended()

    def test_a_prompt_whose_every_token_must_be_computed_hits_nothing_but_can_be_hit(self) -> None:
        harness = self.make_harness()
        for may_reuse_prefix, num_cached_tokens in ((False, 0), (False, 0), (True, 16)):
            id_ = harness.add(range(20), 2, may_reuse_prefix=may_reuse_prefix)
            harness.drain()
            assert harness.ended[id_].num_cached_tokens == num_cached_tokens
        harness.check_ended()

    def test_tenants_share_within_a_salt_and_never_across(self) -> None:
        harness = self.make_harness()
        for salt, num_cached_tokens in (("a", 0), ("b", 0), ("a", 16), ("", 0)):
            id_ = harness.add(range(20), 2, namespace=CacheNamespace(salt))
            harness.drain()
            assert harness.ended[id_].num_cached_tokens == num_cached_tokens
        harness.check_ended()

    def test_forks_of_one_prompt_share_its_blocks_and_write_apart(self) -> None:
        harness = self.make_harness(max_num_sequences=8)
        parent = harness.add(range(22), 12)
        while harness.live[parent].num_generated_tokens == 0:
            harness.step()
        others = [harness.add([*range(22), 500 + index], 10, parent_id=parent) for index in range(3)]
        while any(harness.live[id_].num_generated_tokens == 0 for id_ in others):
            harness.step()
        assert harness.cache.stats().num_used_blocks < 4 * 6
        assert [harness.live[id_].num_cached_tokens for id_ in others] == [22, 22, 22]
        harness.drain()
        harness.check_ended()

    def test_a_fork_whose_parent_is_gone_still_ends_right(self) -> None:
        harness = self.make_harness()
        parent = harness.add(range(22), 2)
        child = harness.add(range(22), 4, parent_id=parent)
        harness.abort([parent])
        orphan = harness.add(range(22), 4, parent_id=parent)
        harness.drain()
        assert set(harness.ended) == {child, orphan}
        harness.check_ended()

    def test_only_the_named_sequences_run(self) -> None:
        harness = self.make_harness()
        first, second, third = (harness.add(range(start, start + 6), 4) for start in (0, 100, 200))
        for _ in range(4):
            harness.step(only=[second])
        assert set(harness.ended) == {second}
        harness.step(only={first, third})
        assert harness.live[first].num_generated_tokens == harness.live[third].num_generated_tokens == 1
        assert not harness.step(only=[]).scheduled
        harness.drain()
        harness.check_ended()

    def test_tokens_are_the_callers_list_read_as_it_grows_and_never_changed(self) -> None:
        harness = self.make_harness()
        id_ = harness.add(range(6), 3)
        sequence = harness.live[id_]
        for num_known_tokens in (6, 7, 8):
            assert len(sequence.token_ids) == num_known_tokens
            (row,) = harness.schedule().scheduled
            assert len(sequence.token_ids) == num_known_tokens
            assert row.start + row.num_tokens == num_known_tokens, "the scheduler works on a stale copy of the tokens"
            harness.finish_step()
        harness.check_ended()

    def test_an_empty_plan_may_be_committed_or_dropped(self) -> None:
        harness = self.make_harness()
        assert not harness.step().scheduled
        assert not harness.schedule().scheduled
        harness.add(range(5), 2)
        harness.drain()
        harness.check_ended()

    def test_a_step_left_open_is_refused(self) -> None:
        harness = self.make_harness()
        harness.add(range(5), 2)
        harness.schedule()
        with pytest.raises(PagedKVError):
            harness.scheduler.schedule()
        harness.finish_step()
        harness.drain()
        harness.check_ended()

    def test_any_order_of_calls(self) -> None:
        """Checks that two replicas with the same random calls agree, keep every rule and end empty."""

        class Machine(SchedulerMachine):
            suite = self

        run_state_machine_as_test(Machine)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class SchedulerMachine(RuleBasedStateMachine):
    """Random calls on a tiny vocabulary and a tiny pool: prefixes are often equal, and the cache is often full."""

    suite: SchedulerConformance

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_step_tokens=st.integers(1, 12),
        max_num_sequences=st.integers(1, 5),
        has_prefix_cache=st.booleans(),
    )
    def create(
        self, num_blocks: int, block_size: int, max_step_tokens: int, max_num_sequences: int, has_prefix_cache: bool
    ) -> None:
        self.num_cache_tokens = num_blocks * block_size
        self.harness = self.suite.make_harness(
            num_blocks,
            block_size,
            max_step_tokens,
            max_num_sequences,
            num_replicas=2,
            vocab_size=2,
            has_prefix_cache=has_prefix_cache,
        )

    @rule(
        prompt=PROMPTS, max_new_tokens=st.integers(1, 10), may_reuse_prefix=st.booleans(), salt=st.sampled_from("aaab")
    )
    def add(self, prompt: list[int], max_new_tokens: int, may_reuse_prefix: bool, salt: str) -> None:
        self._add(prompt, max_new_tokens, CacheNamespace(salt), None, may_reuse_prefix)

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3), max_new_tokens=st.integers(1, 10))
    def fork(self, data: st.DataObject, more: list[int], max_new_tokens: int) -> None:
        parent = self.harness.live[data.draw(st.sampled_from(list(self.harness.live)))]
        num_shared_tokens = data.draw(st.integers(1, len(parent.token_ids)))
        prompt = parent.token_ids[:num_shared_tokens] + more
        self._add(prompt, max_new_tokens, parent.new.namespace, parent.new.id, True)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def step_only(self, data: st.DataObject) -> None:
        self.harness.step(only=data.draw(st.sets(st.sampled_from(list(self.harness.live)))))

    @rule()
    def fail(self) -> None:
        self.harness.schedule()
        self.harness.fail()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sets(st.sampled_from(list(self.harness.live)), min_size=1, max_size=3)))

    @invariant()
    def every_block_is_free_cached_or_used(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.check_ended()

    def _add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        namespace: CacheNamespace,
        parent_id: RequestId | None,
        may_reuse_prefix: bool,
    ) -> None:
        def add() -> None:
            self.harness.add(
                prompt, max_new_tokens, namespace=namespace, parent_id=parent_id, may_reuse_prefix=may_reuse_prefix
            )

        if len(prompt) + max_new_tokens - 1 <= self.num_cache_tokens:
            add()
            return
        with pytest.raises(CapacityError):
            add()
