from __future__ import annotations

import pytest

from pagedkv.plugin.cache.block_pool import BlockPool
from pagedkv.plugin.errors import IntegrityError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_block_goes_from_free_to_used_to_cached_and_back_to_free() -> None:
    pool = BlockPool(3)
    assert counts(pool) == (3, 0, 0)
    (block,) = pool.allocate(1)
    assert counts(pool) == (2, 0, 1)
    pool.release(block, keep_content=True)
    assert counts(pool) == (2, 1, 0)
    assert pool.evict() == block
    assert counts(pool) == (3, 0, 0)


def test_a_block_without_content_to_keep_is_free_at_once() -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(1)[0], keep_content=False)
    assert counts(pool) == (2, 0, 0)


def test_an_empty_pool_hands_out_neighbours_in_order() -> None:
    assert BlockPool(5).allocate(4) == [0, 1, 2, 3]


def test_a_shared_block_stays_used_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block, keep_content=True)
    assert counts(pool) == (0, 0, 1)
    pool.release(block, keep_content=True)
    assert counts(pool) == (0, 1, 0)
    pool.share(block)
    assert counts(pool) == (0, 0, 1)


def test_a_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    for keep_content in (True, False):
        pool.release(block, keep_content=keep_content)
        before = counts(pool)
        with pytest.raises(IntegrityError, match=f"block {block} "):
            pool.release(block, keep_content=True)
        assert counts(pool) == before
        pool.check_integrity({})
        if keep_content:
            pool.share(block)


def test_a_free_block_can_not_be_shared() -> None:
    with pytest.raises(IntegrityError, match="block 1 is free"):
        BlockPool(2).share(1)


def test_the_block_cached_longest_ago_is_evicted_first_unless_it_was_touched() -> None:
    pool = BlockPool(4)
    first, second, third, used = pool.allocate(4)
    for block in (first, second, third):
        pool.release(block, keep_content=True)
    pool.touch(first)
    pool.touch(used)
    assert [pool.evict() for _ in range(3)] == [second, third, first]


def test_integrity_is_checked_against_the_holders() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.check_integrity({block: 1})
    with pytest.raises(IntegrityError, match="reference count 1, but 2 holders"):
        pool.check_integrity({block: 2})
    pool.ref_counts[block] = 0
    with pytest.raises(IntegrityError, match="each of the 3 blocks once"):
        pool.check_integrity({})
