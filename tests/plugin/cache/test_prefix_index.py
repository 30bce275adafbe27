from __future__ import annotations

from collections import Counter

import pytest

from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.cache.prefix_index import PrefixIndex
from pagedkv.plugin.errors import IntegrityError


def test_a_block_is_found_by_its_name_until_it_is_forgotten() -> None:
    index = PrefixIndex()
    index.publish(3, b"name")
    assert index.find(b"name") == 3
    assert index.find_name(3) == b"name"
    index.forget(3)
    assert index.find(b"name") is None
    assert not index.is_named(3)
    index.publish(4, b"name")
    assert index.find(b"name") == 4


def test_the_first_block_keeps_a_name_that_a_second_one_wants() -> None:
    index = PrefixIndex()
    index.publish(3, b"name")
    index.publish(4, b"name")
    assert index.find(b"name") == 3
    assert not index.is_named(4)
    index.check_integrity(Counter())


def test_a_prefix_is_found_up_to_the_first_block_that_is_missing_and_pending_beyond() -> None:
    names = BlockNames(range(20), b"\0" * 32, 4)
    names.extend(5)
    index = PrefixIndex()
    for position in (0, 1, 3):
        index.publish(10 + position, names.names[position])
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
