"""What is particular to the paged cache manager; what any manager owes is in the conformance suite."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pagedkv.plugin.cache.manager import PagedCacheManager
from pagedkv.plugin.conformance.cache_manager_harness import CacheManagerHarness
from pagedkv.plugin.errors import IntegrityError, RequestError
from pagedkv.plugin.interface import CacheManager
from pagedkv.plugin.registry import find_interface_faults
from pagedkv.plugin.requests import CacheNamespace


def make_harness(num_blocks: int = 16, block_size: int = 4, has_prefix_cache: bool = True) -> CacheManagerHarness:
    manager = PagedCacheManager.create(num_blocks, block_size, has_prefix_cache=has_prefix_cache)
    return CacheManagerHarness(manager, num_blocks, block_size)


def test_it_fits_the_interface() -> None:
    assert find_interface_faults(PagedCacheManager, CacheManager) == []
    assert isinstance(PagedCacheManager.create(4, 4), CacheManager)


def test_numpy_reads_a_block_table_without_a_loop() -> None:
    harness = make_harness()
    seq_id = harness.open(range(10))
    harness.compute(seq_id)
    table = harness.manager.block_table(seq_id)
    assert isinstance(table, array)
    view = np.frombuffer(table, dtype=np.int32)
    assert view.tolist() == list(table)


def test_blocks_of_another_kv_dtype_have_other_names() -> None:
    tables = {}
    for kv_dtype_name in ("int8", "bf16"):
        manager = PagedCacheManager.create(8, 4, kv_dtype_name=kv_dtype_name)
        harness = CacheManagerHarness(manager, 8, 4)
        harness.compute(harness.open(range(8)))
        tables[kv_dtype_name] = {manager._index.find_name(block) for block in range(8)} - {None}
    assert len(tables["int8"]) == len(tables["bf16"]) == 2
    assert not tables["int8"] & tables["bf16"]


def test_a_decode_step_between_two_blocks_computes_no_name() -> None:
    harness = make_harness()
    seq_id = harness.open(range(5))
    harness.compute(seq_id)
    names = harness.manager._sequences[seq_id].names.names
    assert len(names) == 1
    for token_id in range(2):
        harness.append(seq_id, token_id)
        harness.compute(seq_id)
        assert len(names) == 1


def test_a_parent_computed_twice_is_not_evicted_before_its_cached_child() -> None:
    harness = make_harness(num_blocks=8)
    first = harness.open(range(4))
    harness.compute(first)
    second = harness.open(range(8), may_reuse_prefix=False)
    harness.compute(second)  # its first block stays nameless: the name is taken
    harness.release(first)
    between = harness.open(range(100, 104))
    harness.compute(between)
    harness.release(between)
    harness.release(second)
    harness.compute(harness.open(range(200, 225)))  # evicts two of the three cached blocks
    assert harness.plan(harness.open([*range(8), 9]), 9).num_cached_tokens == 4


def test_a_nameless_block_takes_its_name_when_the_block_that_had_it_is_evicted() -> None:
    harness = make_harness(num_blocks=6)
    first = harness.open(range(4))
    harness.compute(first)
    second = harness.open(range(8), may_reuse_prefix=False)
    harness.compute(second)
    harness.release(first)
    pressing = harness.open(range(200, 216))
    harness.compute(pressing)
    assert harness.manager.stats().evictions == 1
    harness.release(second)
    harness.check()
    assert harness.plan(harness.open([*range(8), 9]), 9).num_cached_tokens == 8


def test_the_source_of_a_copy_is_given_to_nobody_before_the_copy_has_run() -> None:
    harness = make_harness(num_blocks=4)
    parent = harness.open(range(6))
    harness.compute(parent)
    child = harness.open([*range(6), 99])
    harness.fork(parent, child, 6)
    grant = harness.acquire(child, 7)
    assert grant is not None
    (copy,) = grant.copies
    harness.release(parent)
    newcomer = harness.open(range(100, 108))
    assert harness.plan(newcomer, 8).num_missing_blocks == 1, "the source is still held"
    assert harness.acquire(newcomer, 4) is not None
    assert copy.source not in harness.manager.block_table(newcomer)
    harness.run_step()
    assert harness.plan(newcomer, 8).num_missing_blocks == 0, "the step gave it back"
    harness.compute(newcomer)


def test_a_fork_of_a_sequence_that_waits_for_its_copy_shares_the_source() -> None:
    harness = make_harness()
    parent = harness.open(range(6))
    harness.compute(parent)
    child, grandchild = harness.open([*range(6), 99]), harness.open([*range(6), 98])
    harness.fork(parent, child, 6)
    grant = harness.acquire(child, 7)
    assert grant is not None
    assert harness.fork(child, grandchild, 6) == 6
    assert harness.manager.block_table(grandchild)[1] == grant.copies[0].source
    assert harness.acquire(grandchild, 7) is not None
    harness.run_step()


def test_a_dropped_copy_gives_its_source_back() -> None:
    harness = make_harness(has_prefix_cache=False)
    parent = harness.open(range(6))
    harness.compute(parent)
    child = harness.open([*range(6), 99])
    harness.fork(parent, child, 6)
    assert harness.acquire(child, 7) is not None
    harness.release(parent)
    harness.release(child)
    harness.check()
    assert harness.manager.stats().num_free_blocks == 16


def test_used_slots_are_counted_once_however_far_each_sharer_uses_a_block() -> None:
    harness = make_harness(block_size=8)
    parent = harness.open(range(6))
    harness.compute(parent)
    children = [harness.open([*range(num_common), 99]) for num_common in (5, 3)]
    for child, num_shared in zip(children, (5, 3), strict=True):
        assert harness.fork(parent, child, 6) == num_shared
    num_used_slots = []
    for seq_id in (parent, *children):
        num_used_slots.append(harness.manager.stats().num_used_slots)
        harness.release(seq_id)
    assert num_used_slots == [6, 5, 3]


def test_a_fork_across_namespaces_is_refused() -> None:
    harness = make_harness()
    parent = harness.open(range(6))
    harness.compute(parent)
    child = harness.open(range(6), CacheNamespace(salt="other"))
    with pytest.raises(RequestError, match="another salt or adapter"):
        harness.manager.fork(parent, child, 6)
    harness.check()


def test_a_sequence_that_holds_blocks_can_not_become_a_fork() -> None:
    harness = make_harness()
    parent, child = harness.open(range(6)), harness.open(range(6))
    harness.compute(parent)
    harness.compute(child)
    with pytest.raises(IntegrityError, match="holds blocks"):
        harness.manager.fork(parent, child, 6)


def test_a_fork_that_may_not_reuse_a_prefix_shares_nothing() -> None:
    harness = make_harness()
    parent = harness.open(range(6))
    harness.compute(parent)
    child = harness.open(range(6), may_reuse_prefix=False)
    assert harness.fork(parent, child, 6) == 0
    assert len(harness.manager.block_table(child)) == 0


def test_integrity_finds_a_block_held_twice_a_wrong_count_and_a_name_of_other_tokens() -> None:
    def break_table(harness: CacheManagerHarness) -> None:
        harness.manager.block_table(seq_id)[1] = harness.manager.block_table(seq_id)[0]

    def break_ref_count(harness: CacheManagerHarness) -> None:
        harness.manager._pool.ref_counts[harness.manager.block_table(seq_id)[0]] += 1

    def break_tokens(harness: CacheManagerHarness) -> None:
        harness.sequences[seq_id].token_ids[0] = 77

    def break_progress(harness: CacheManagerHarness) -> None:
        harness.manager._sequences[seq_id].num_computed_tokens = 4

    for damage in (break_table, break_ref_count, break_tokens, break_progress):
        harness = make_harness()
        seq_id = harness.open(range(10))
        harness.compute(seq_id)
        damage(harness)
        with pytest.raises(IntegrityError):
            harness.manager.check_integrity()
