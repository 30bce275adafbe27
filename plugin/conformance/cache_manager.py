"""Conformance suite for `CacheManager` plugins, in pytest. It loads the plugin by its registered name.

A plugin author's test file:

    from pagedkv.plugin.conformance.cache_manager import CacheManagerConformance

    class TestMyCacheManager(CacheManagerConformance):
        cache_manager_name = "mine"                    # as in [project.entry-points."pagedkv.cache_managers"]

pytest runs it like any test class; `pytest` and `hypothesis` must be installed. The suite does not test how a manager
finds prefixes, only that everything it reports as cached is there, and that whole blocks of an equal prefix are found.
`CacheManagerHarness` checks every step against the simulated content of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv.plugin.conformance.cache_manager_harness import DEFAULT_NAMESPACE, CacheManagerHarness
from pagedkv.plugin.errors import IntegrityError
from pagedkv.plugin.registry import CACHE_MANAGERS, load_plugin
from pagedkv.plugin.requests import CacheNamespace, RequestId

NAMESPACES = (CacheNamespace(), CacheNamespace(salt="a"), CacheNamespace(adapter_id="a"), CacheNamespace("a", "a"))
UNKNOWN_ID = RequestId(2**40)


class CacheManagerConformance:
    """The suite. Subclass it and set `cache_manager_name`."""

    cache_manager_name: ClassVar[str]

    def make_harness(
        self, num_blocks: int = 64, block_size: int = 16, has_prefix_cache: bool = True
    ) -> CacheManagerHarness:
        """Makes the cache manager under test, empty."""
        plugin = load_plugin(CACHE_MANAGERS, self.cache_manager_name)
        manager = plugin.create(num_blocks, block_size, has_prefix_cache=has_prefix_cache)
        return CacheManagerHarness(manager, num_blocks, block_size)

    def test_100_tokens_take_7_blocks_of_16_the_last_holding_4(self) -> None:
        harness = self.make_harness()
        seq_id = harness.open(range(100))
        harness.compute(seq_id)
        assert len(harness.manager.block_table(seq_id)) == 7
        stats = harness.manager.stats()
        assert (stats.num_used_blocks, stats.num_used_slots) == (7, 6 * 16 + 4)

    def test_blocks_come_on_demand_and_the_table_is_a_live_view(self) -> None:
        harness = self.make_harness(block_size=4)
        seq_id = harness.open(range(8))
        table = harness.manager.block_table(seq_id)
        for num_tokens, num_blocks in ((3, 1), (4, 1), (5, 2), (8, 2)):
            harness.compute(seq_id, num_tokens)
            assert len(table) == num_blocks
        harness.append(seq_id, 8)
        harness.compute(seq_id)
        assert len(table) == 3

    @pytest.mark.parametrize("num_blocks", [1, 2, 7])
    @pytest.mark.parametrize("extra_tokens", [-1, 0, 1])
    def test_the_last_token_is_computed_however_the_prompt_ends_in_its_block(
        self, num_blocks: int, extra_tokens: int
    ) -> None:
        harness = self.make_harness()
        prompt = range(16 * num_blocks + extra_tokens)
        first = harness.open(prompt)
        assert harness.compute(first) == 0
        num_cached = harness.compute(harness.open(prompt))
        assert (len(prompt) - 1) // 16 * 16 <= num_cached < len(prompt)
        longer = harness.open([*prompt, 1000, 1001])
        assert harness.compute(longer) >= len(prompt) // 16 * 16

    def test_a_sequence_dropped_before_its_prefill_ran_is_never_a_hit(self) -> None:
        harness = self.make_harness()
        prompt = range(40)
        for is_written in (False, True):
            seq_id = harness.open(prompt)
            assert harness.acquire(seq_id, 40) is not None
            if is_written:
                harness.run_step()
            harness.release(seq_id)
            assert (harness.plan(harness.open(prompt), 40).num_cached_tokens >= 32) == is_written
            harness.check()

    def test_a_prompt_given_up_in_mid_prefill_is_a_hit_as_far_as_it_was_written(self) -> None:
        harness = self.make_harness()
        seq_id = harness.open(range(80))
        harness.compute(seq_id, 40)
        assert harness.acquire(seq_id, 80) is not None
        harness.fail_step()
        num_cached = harness.compute(harness.open(range(80)))
        assert 32 <= num_cached <= 40

    def test_a_cached_prefix_and_a_newcomer_that_needs_its_room_in_one_step(self) -> None:
        harness = self.make_harness(num_blocks=8, block_size=4)
        first = harness.open(range(16))
        harness.compute(first)
        harness.release(first)
        again, newcomer = harness.open([*range(16), 99]), harness.open(range(100, 120))
        assert harness.plan(newcomer, 20).num_missing_blocks == 0
        assert harness.acquire(again, 17) is not None
        assert harness.acquire(newcomer, 20) is None, "four blocks are hit, one is new, three are left of five"
        assert harness.acquire(newcomer, 12) is not None
        shared = set(harness.manager.block_table(again)) & set(harness.manager.block_table(newcomer))
        assert not shared
        harness.run_step()

    def test_a_sequence_never_evicts_its_own_hits(self) -> None:
        harness = self.make_harness(num_blocks=8, block_size=4)
        for start in (0, 100):
            seq_id = harness.open(range(start, start + 16))
            harness.compute(seq_id)
            harness.release(seq_id)
        longer = harness.open(range(32))
        assert harness.plan(longer, 36).num_missing_blocks == 1, "cached blocks that are hit are no room"
        assert harness.acquire(longer, 36) is None
        assert harness.compute(longer, 32) == 16
        assert harness.manager.stats().evictions == 4

    def test_an_evicted_block_is_a_miss_and_can_be_cached_again_under_its_new_content(self) -> None:
        harness = self.make_harness(num_blocks=4, block_size=4)
        old, new = range(16), range(100, 116)
        for prompt, other in ((old, new), (new, old), (old, new)):
            seq_id = harness.open(prompt)
            assert harness.compute(seq_id) == 0
            harness.release(seq_id)
            assert harness.plan(harness.open(prompt), 16).num_cached_tokens >= 12
            assert harness.plan(harness.open(other), 16).num_cached_tokens == 0
        assert harness.manager.stats().evictions == 8

    def test_tails_are_evicted_before_their_parents_and_least_recently_used_first(self) -> None:
        harness = self.make_harness(num_blocks=8, block_size=4)
        for start in (0, 100):
            seq_id = harness.open(range(start, start + 16))
            harness.compute(seq_id)
            harness.release(seq_id)
        pressing = harness.open(range(200, 208))
        harness.compute(pressing)
        assert harness.plan(harness.open([*range(16), 99]), 17).num_cached_tokens == 8
        assert harness.plan(harness.open([*range(100, 116), 99]), 17).num_cached_tokens == 16

    def test_a_prompt_of_465_tokens_of_which_256_are_cached_is_readmitted_with_209_to_compute(self) -> None:
        harness = self.make_harness()
        prompt = list(range(465))
        seq_id = harness.open(prompt)
        harness.compute(seq_id, 256)
        assert harness.acquire(seq_id, 465) is not None
        readmitted = harness.preempt(seq_id)
        plan = harness.plan(readmitted, 465)
        assert (plan.num_cached_tokens, plan.num_missing_blocks) == (256, 0)
        assert harness.compute(readmitted) == 256
        assert harness.sequences[readmitted].num_computed_tokens - 256 == 209
        assert len(harness.manager.block_table(readmitted)) == 30

    def test_readmissions_and_refused_admissions_stay_out_of_the_prefix_counters(self) -> None:
        harness = self.make_harness(num_blocks=4, block_size=4)
        seq_id = harness.open(range(12))
        harness.compute(seq_id)
        refused = harness.open(range(100, 112))
        assert harness.acquire(refused, 12) is None
        harness.compute(harness.preempt(seq_id))
        stats = harness.manager.stats()
        assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (12, 0)
        harness.compute(harness.open(range(10)))
        stats = harness.manager.stats()
        assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (22, 8)

    def test_equal_tokens_are_reused_within_a_namespace_and_never_across(self) -> None:
        harness = self.make_harness()
        prompt = range(40)
        for namespace in NAMESPACES:
            assert harness.compute(harness.open(prompt, namespace)) == 0
        for namespace in NAMESPACES:
            assert harness.compute(harness.open(prompt, namespace)) >= 32

    def test_a_block_is_found_only_behind_the_beginning_it_was_computed_behind(self) -> None:
        harness = self.make_harness(block_size=4)
        harness.compute(harness.open([1, 1, 1, 1, 2, 2, 2, 2, 0]))
        assert harness.compute(harness.open([2, 2, 2, 2, 0])) == 0
        assert harness.compute(harness.open([3, 3, 3, 3, 2, 2, 2, 2, 0])) == 0
        assert harness.compute(harness.open([1, 1, 1, 1, 2, 2, 2, 2, 1])) == 8

    def test_a_sequence_that_may_not_reuse_a_prefix_hits_nothing_but_can_be_hit(self) -> None:
        harness = self.make_harness()
        for may_reuse_prefix, num_cached in ((False, 0), (False, 0), (True, 32)):
            seq_id = harness.open(range(40), may_reuse_prefix=may_reuse_prefix)
            assert harness.compute(seq_id) == num_cached
            harness.release(seq_id)

    def test_without_a_prefix_cache_nothing_is_found_or_kept(self) -> None:
        harness = self.make_harness(has_prefix_cache=False)
        for _ in range(2):
            seq_id = harness.open(range(40))
            assert harness.compute(seq_id) == 0
            harness.release(seq_id)
        stats = harness.manager.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        assert stats.prefix_cache_query_tokens == 0

    def test_of_32_equal_prompts_at_once_31_see_what_the_first_is_about_to_fill(self) -> None:
        harness = self.make_harness(num_blocks=200)
        first, *others = (harness.open(range(1024 + 10)) for _ in range(32))
        assert harness.plan(first, 1034).num_pending_tokens == 0, "open, but without blocks: nobody fills them yet"
        assert harness.acquire(first, 512) is not None
        for seq_id in others:
            plan = harness.plan(seq_id, 1034)
            assert (plan.num_cached_tokens, plan.num_pending_tokens) == (0, 1024)
        harness.run_step()
        plan = harness.plan(others[0], 1034)
        assert (plan.num_cached_tokens, plan.num_pending_tokens) == (512, 1024)
        harness.compute(first)
        assert [harness.compute(seq_id) for seq_id in others] == [1024] * 31

    def test_what_a_released_sequence_would_have_filled_is_no_longer_pending(self) -> None:
        harness = self.make_harness()
        first, second = harness.open(range(40)), harness.open(range(40))
        assert harness.acquire(first, 40) is not None
        assert harness.plan(second, 40).num_pending_tokens == 32
        harness.release(first)
        assert harness.plan(second, 40).num_pending_tokens == 0

    def test_four_forks_of_a_prompt_that_ends_in_mid_block_write_apart_in_fewer_than_four_times_the_blocks(
        self,
    ) -> None:
        harness = self.make_harness()
        parent = harness.open(range(100))
        harness.compute(parent)
        table_before = list(harness.manager.block_table(parent))
        forks = [harness.open([*range(100), 500 + index]) for index in range(3)]
        assert [harness.fork(parent, seq_id, 100) for seq_id in forks] == [100] * 3
        harness.append(parent, 400)
        for seq_id in (*forks, parent):
            assert harness.acquire(seq_id, 101) is not None
        harness.run_step()
        assert harness.manager.stats().copies >= 3
        assert harness.manager.stats().num_used_blocks == 6 + 4
        assert list(harness.manager.block_table(parent))[:6] == table_before[:6]
        for seq_id in forks:
            harness.release(seq_id)
            harness.check()

    def test_the_writer_gets_a_copy_and_readers_keep_their_block(self) -> None:
        harness = self.make_harness()
        parent = harness.open(range(20))
        harness.compute(parent)
        child = harness.open([*range(20), 99])
        harness.fork(parent, child, 20)
        reader_table = list(harness.manager.block_table(child))
        harness.append(parent, 400)
        grant = harness.acquire(parent, 21)
        assert grant is not None
        assert [copy.source for copy in grant.copies] == [reader_table[1]]
        assert list(harness.manager.block_table(child)) == reader_table
        assert harness.manager.block_table(parent)[1] == grant.copies[0].target
        harness.run_step()

    def test_a_fork_with_nothing_new_computes_its_last_token_in_a_copy(self) -> None:
        harness = self.make_harness()
        parent = harness.open(range(32))
        harness.compute(parent)
        child = harness.open(range(32))
        assert harness.fork(parent, child, 32) == 31
        grant = harness.acquire(child, 32)
        assert grant is not None
        assert len(grant.copies) == 1
        harness.run_step()

    def test_asking_for_no_more_than_is_computed_does_not_make_a_shared_block_writable(self) -> None:
        harness = self.make_harness()
        parent = harness.open(range(20))
        harness.compute(parent)
        child = harness.open([*range(20), 99])
        harness.fork(parent, child, 20)
        grant = harness.acquire(child, 20)
        assert grant is not None
        assert grant.copies == ()
        grant = harness.acquire(child, 21)
        assert grant is not None
        assert len(grant.copies) == 1
        harness.run_step()

    def test_a_fork_shares_the_common_beginning_only(self) -> None:
        harness = self.make_harness()
        parent = harness.open(range(50))
        harness.compute(parent, 40)
        for tokens, num_shared in (([*range(20), 99, 98], 20), ([99, 98], 0), (range(60), 40)):
            child = harness.open(tokens)
            assert harness.fork(parent, child, 40) == num_shared
            harness.compute(child)

    def test_the_last_holder_of_a_findable_block_does_not_overwrite_it(self) -> None:
        harness = self.make_harness(block_size=4)
        parent = harness.open(range(8))
        harness.compute(parent)
        child = harness.open([*range(7), 99])
        assert harness.fork(parent, child, 8) == 7
        harness.release(parent)
        assert harness.acquire(child, 8) is not None
        finder = harness.open(range(9))
        assert harness.acquire(finder, 9) is not None
        harness.run_step()

    def test_acquire_is_all_or_nothing(self) -> None:
        harness = self.make_harness(num_blocks=4, block_size=4)
        seq_id = harness.open(range(40))
        assert harness.plan(seq_id, 24).num_missing_blocks == 2
        assert harness.acquire(seq_id, 24) is None
        harness.compute(seq_id, 16)
        assert harness.acquire(seq_id, 17) is None
        harness.check()

    def test_a_copy_needs_room_too(self) -> None:
        harness = self.make_harness(num_blocks=2, block_size=4)
        parent = harness.open(range(6))
        harness.compute(parent)
        child = harness.open([*range(6), 99])
        harness.fork(parent, child, 6)
        assert harness.plan(child, 7).num_missing_blocks == 1
        assert harness.acquire(child, 7) is None
        harness.release(parent)
        assert harness.acquire(child, 7) is not None
        harness.run_step()

    def test_free_cached_and_used_blocks_are_all_blocks_after_every_step(self) -> None:
        harness = self.make_harness(num_blocks=64, block_size=4)
        seq_id = harness.open(range(10))
        for num_tokens in (4, 8, 10):
            harness.compute(seq_id, num_tokens)
        for token_id in range(200):
            harness.append(seq_id, token_id)
            harness.compute(seq_id)
        harness.release(seq_id)
        harness.check()
        assert harness.manager.stats().num_used_blocks == 0

    def test_a_double_release_and_an_unknown_sequence_raise_at_once(self) -> None:
        harness = self.make_harness()
        seq_id = harness.open(range(20))
        harness.compute(seq_id)
        harness.release(seq_id)
        manager = harness.manager
        for call in (
            lambda: manager.release(seq_id),
            lambda: manager.release(UNKNOWN_ID),
            lambda: manager.plan(seq_id, 1),
            lambda: manager.acquire(seq_id, 1),
            lambda: manager.commit(seq_id, 1),
            lambda: manager.block_table(seq_id),
        ):
            with pytest.raises(IntegrityError):
                call()
        harness.check()

    def test_a_caller_that_contradicts_itself_is_told(self) -> None:
        harness = self.make_harness()
        seq_id = harness.open(range(20))
        with pytest.raises(IntegrityError):
            harness.manager.open(seq_id, [1], DEFAULT_NAMESPACE)
        with pytest.raises(IntegrityError):
            harness.manager.commit(seq_id, 1)
        harness.compute(seq_id)
        with pytest.raises(IntegrityError):
            harness.manager.commit(seq_id, 19)
        with pytest.raises(IntegrityError):
            harness.manager.commit(seq_id, 21)
        with pytest.raises(IntegrityError):
            harness.manager.fork(seq_id, harness.open(range(30)), 21)
        harness.check()

    def test_equal_calls_give_equal_blocks(self) -> None:
        tables = [self._run_under_pressure(self.make_harness(num_blocks=12, block_size=4)) for _ in range(2)]
        assert tables[0] == tables[1]

    def _run_under_pressure(self, harness: CacheManagerHarness) -> list[Sequence[int]]:
        tables: list[Sequence[int]] = []
        for index in range(30):
            seq_id = harness.open(range(7 * (index % 5), 7 * (index % 5) + 10 + index % 9), NAMESPACES[index % 2])
            while harness.acquire(seq_id, len(harness.sequences[seq_id].token_ids)) is None:
                harness.release(next(iter(harness.sequences)))
            harness.run_step()
            tables.append(list(harness.manager.block_table(seq_id)))
        assert harness.manager.stats().evictions > 0
        return tables

    def test_any_sequence_of_calls_keeps_the_content_of_every_computed_token(self) -> None:
        # Many examples: rare orders of events matter, and a call takes microseconds.
        more = settings(max_examples=4 * settings().max_examples, stateful_step_count=40)

        class Machine(_CacheManagerMachine):
            suite = self

        run_state_machine_as_test(Machine, settings=more)


MAX_TOKENS = 12
NUMBERS = st.integers(0, 5)
MOSTLY_ALL = st.one_of(st.just(99), st.integers(0, 12))
FEW_TOKENS = st.lists(st.integers(0, 1), max_size=6)


class _CacheManagerMachine(RuleBasedStateMachine):
    """Draws calls over few tokens and few small blocks, so that prefixes are often equal. The harness checks them."""

    suite: ClassVar[CacheManagerConformance]

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 3, 4]),
        num_blocks=st.integers(6, 12),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS),
    )
    def make(self, block_size: int, num_blocks: int, has_prefix_cache: bool, prompt: list[int]) -> None:
        self.harness = self.suite.make_harness(num_blocks, block_size, has_prefix_cache)
        self.prompts = [prompt]

    def _pick(self, number: int) -> RequestId:
        return list(self.harness.sequences)[number % len(self.harness.sequences)]

    def _has_sequences(self) -> bool:
        return bool(self.harness.sequences)

    def _has_room(self) -> bool:
        return len(self.harness.sequences) < 5

    def _has_grants(self) -> bool:
        return any(
            sequence.num_granted_tokens > sequence.num_computed_tokens for sequence in self.harness.sequences.values()
        )

    def _computed_ids(self) -> list[RequestId]:
        return [seq_id for seq_id, sequence in self.harness.sequences.items() if sequence.num_computed_tokens]

    @precondition(_has_room)
    @rule(
        number=NUMBERS,
        num_common=MOSTLY_ALL,
        tail=FEW_TOKENS,
        namespace=st.sampled_from([NAMESPACES[0]] * 4 + [*NAMESPACES]),
        may_reuse_prefix=st.sampled_from([True, True, True, False]),
        num_tokens=MOSTLY_ALL,
    )
    def admit(
        self,
        number: int,
        num_common: int,
        tail: list[int],
        namespace: CacheNamespace,
        may_reuse_prefix: bool,
        num_tokens: int,
    ) -> None:
        tokens = [*self.prompts[number % len(self.prompts)][:num_common], *tail][:MAX_TOKENS] or [0]
        self.prompts.append(tokens)
        seq_id = self.harness.open(tokens, namespace, may_reuse_prefix=may_reuse_prefix)
        self.harness.acquire(seq_id, min(num_tokens, len(tokens)))

    @precondition(_has_sequences)
    @rule(number=NUMBERS, token_id=st.integers(0, 1))
    def append(self, number: int, token_id: int) -> None:
        if len(self.harness.sequences[self._pick(number)].token_ids) < MAX_TOKENS:
            self.harness.append(self._pick(number), token_id)

    @precondition(_has_sequences)
    @rule(number=NUMBERS, num_tokens=MOSTLY_ALL)
    def acquire(self, number: int, num_tokens: int) -> None:
        seq_id = self._pick(number)
        sequence = self.harness.sequences[seq_id]
        self.harness.acquire(seq_id, min(sequence.num_computed_tokens + num_tokens, len(sequence.token_ids)))

    @precondition(_has_sequences)
    @rule()
    def decode_all(self) -> None:
        for seq_id, sequence in self.harness.sequences.items():
            self.harness.acquire(seq_id, len(sequence.token_ids))
        self.harness.run_step()
        for seq_id, sequence in self.harness.sequences.items():
            if sequence.num_computed_tokens == len(sequence.token_ids) < MAX_TOKENS:
                self.harness.append(seq_id, 0)

    @precondition(_has_grants)
    @rule(does_fail=st.sampled_from([False] * 5 + [True]))
    def end_step(self, does_fail: bool) -> None:
        if does_fail:
            self.harness.fail_step()
        else:
            self.harness.run_step()

    @precondition(lambda self: self._computed_ids() and self._has_room())
    @rule(
        number=NUMBERS,
        num_common=MOSTLY_ALL,
        tail=st.lists(st.integers(0, 1), max_size=2),
        max_shared=MOSTLY_ALL,
        does_acquire=st.sampled_from([True, True, False]),
    )
    def fork(self, number: int, num_common: int, tail: list[int], max_shared: int, does_acquire: bool) -> None:
        parent_id = self._computed_ids()[number % len(self._computed_ids())]
        parent = self.harness.sequences[parent_id]
        child_id = self.harness.open([*parent.token_ids[:num_common], *tail] or [0], parent.namespace)
        self.harness.fork(parent_id, child_id, min(max_shared, parent.num_computed_tokens))
        if does_acquire:
            self.harness.acquire(child_id, len(self.harness.sequences[child_id].token_ids))

    @precondition(_has_sequences)
    @rule(number=NUMBERS, is_preempted=st.booleans())
    def release(self, number: int, is_preempted: bool) -> None:
        if is_preempted:
            self.harness.preempt(self._pick(number))
        else:
            self.harness.release(self._pick(number))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()
