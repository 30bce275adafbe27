from __future__ import annotations

from collections import Counter

import pytest

from pagedkv.plugin.cache import block_names
from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.cache.manager import PagedCacheManager
from pagedkv.plugin.cache.prefix_index import PrefixIndex
from pagedkv.plugin.errors import IntegrityError
from pagedkv.plugin.requests import CacheNamespace, RequestId


def test_a_block_is_found_by_its_name_until_it_is_forgotten() -> None:
    index = PrefixIndex()
    index.publish(3, b"name", b"payload")
    assert index.find(b"name", b"payload") == 3
    assert index.find_payload(3) == b"payload"
    index.forget(3)
    assert index.find(b"name", b"payload") is None
    assert not index.is_named(3)
    index.publish(4, b"name", b"payload")
    assert index.find(b"name", b"payload") == 4


def test_the_first_block_keeps_a_name_that_a_second_one_wants() -> None:
    index = PrefixIndex()
    index.publish(3, b"name", b"payload")
    index.publish(4, b"name", b"payload")
    assert index.find(b"name", b"payload") == 3
    assert not index.is_named(4)
    index.check_integrity(Counter())


def test_a_collision_of_names_is_a_miss() -> None:
    index = PrefixIndex()
    index.publish(3, b"name", b"payload")
    assert index.find(b"name", b"another payload") is None


def test_no_cache_of_another_is_handed_out_where_every_name_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_names, "hash_block", lambda payload: b"\0" * block_names.NAME_BYTES)
    manager = PagedCacheManager.create(16, 4)
    mine, others, again = RequestId(1), RequestId(2), RequestId(3)
    for seq_id, token_ids in ((mine, [1] * 5), (others, [2] * 5), (again, [1] * 5)):
        manager.open(seq_id, token_ids, CacheNamespace())
        grant = manager.acquire(seq_id, 5)
        assert grant is not None
        assert grant.num_cached_tokens == (4 if seq_id == again else 0)
        manager.commit(seq_id, 5)
        manager.check_integrity()


def test_a_prefix_is_found_up_to_the_first_block_that_is_missing_and_pending_beyond() -> None:
    names = BlockNames(range(20), b"\0" * 32, 4)
    names.extend(5)
    index = PrefixIndex()
    for position in (0, 1, 3):
        index.publish(10 + position, names.names[position], names.payloads[position])
    fresh = BlockNames(range(20), b"\0" * 32, 4)
    assert index.find_prefix(fresh, 5) == [10, 11]
    assert index.find_prefix(fresh, 1) == [10]
    assert index.count_pending_prefix(fresh, 2, 5) == 2
    index.expect(names.names[2:3])
    assert index.count_pending_prefix(fresh, 2, 5) == 4
    assert index.find_prefix(fresh, 5) == [10, 11]


def test_a_miss_at_once_computes_one_name() -> None:
    names = BlockNames(range(400), b"\0" * 32, 4)
    index = PrefixIndex()
    assert index.find_prefix(names, 99) == []
    assert index.count_pending_prefix(names, 0, 99) == 0
    assert len(names.names) == 1


def test_a_name_is_pending_until_its_last_writer_is_gone() -> None:
    names = BlockNames(range(8), b"\0" * 32, 4)
    names.extend(1)
    index = PrefixIndex()
    index.expect(names.names)
    index.expect(names.names)
    index.stop_expecting(names.names)
    assert index.count_pending_prefix(names, 0, 1) == 1
    index.check_integrity(Counter(names.names))
    index.stop_expecting(names.names)
    assert index.count_pending_prefix(names, 0, 1) == 0
    with pytest.raises(IntegrityError, match="about to fill"):
        index.check_integrity(Counter(names.names))
