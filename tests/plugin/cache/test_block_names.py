from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from pagedkv.plugin.cache import block_names
from pagedkv.plugin.cache.block_names import BlockNames, hash_root
from pagedkv.plugin.requests import CacheNamespace

ROOT = hash_root(CacheNamespace(), "bf16", 4)
TOKENS = [5, 6, 7, 8, 1, 2, 3, 4, 9]

PRINT_NAMES = """
from pagedkv.plugin.cache.block_names import BlockNames, hash_root
from pagedkv.plugin.requests import CacheNamespace
names = BlockNames(range(1000, 1064), hash_root(CacheNamespace("tenant", "adapter"), "int8", 16), 16)
names.extend(4)
print(hash("a"), *(name.hex() for name in names.names))
"""


def name_blocks(token_ids: list[int], root: bytes = ROOT) -> list[bytes]:
    names = BlockNames(token_ids, root, 4)
    names.extend(len(token_ids) // 4)
    return names.names


def test_names_are_equal_in_processes_that_hash_differently() -> None:
    outputs = []
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONSAFEPATH": "1"}
        run = subprocess.run(
            [sys.executable, "-c", PRINT_NAMES], env=environ, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout.split())
    assert outputs[0][0] != outputs[1][0], "the seeds had no effect"
    assert outputs[0][1:] == outputs[1][1:]
    assert len(set(outputs[0][1:])) == 4


def test_a_name_stands_for_the_whole_beginning() -> None:
    first = name_blocks([1, 1, 1, 1, 2, 2, 2, 2])
    assert name_blocks([1, 1, 1, 1, 2, 2, 2, 2, 3]) == first
    other = name_blocks([1, 1, 1, 9, 2, 2, 2, 2])
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("namespace", "kv_dtype_name", "block_size"),
    [
        (CacheNamespace(salt="a"), "bf16", 4),
        (CacheNamespace(adapter_id="a"), "bf16", 4),
        (CacheNamespace("a", "b"), "bf16", 4),
        (CacheNamespace("b", "a"), "bf16", 4),
        (CacheNamespace("ab", ""), "bf16", 4),
        (CacheNamespace("", "ab"), "bf16", 4),
        (CacheNamespace(), "int8", 4),
        (CacheNamespace(), "bf16", 8),
        (CacheNamespace(salt="\ud800"), "bf16", 4),
    ],
)
def test_whatever_makes_kv_differ_makes_another_name_and_equal_fields_the_same(
    namespace: CacheNamespace, kv_dtype_name: str, block_size: int
) -> None:
    root = hash_root(namespace, kv_dtype_name, block_size)
    assert root != ROOT
    assert root == hash_root(CacheNamespace(namespace.salt, namespace.adapter_id), kv_dtype_name, block_size)


def test_fields_never_run_together() -> None:
    fields = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", ""), ("", "a"), ("", ""), ("b", "")]
    assert len({hash_root(CacheNamespace(*field), "bf16", 4) for field in fields}) == len(fields)


def test_each_name_is_computed_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    hash_block = block_names.hash_block
    monkeypatch.setattr(block_names, "hash_block", lambda payload: hashed.append(payload) or hash_block(payload))
    names = BlockNames(TOKENS, ROOT, 4)
    assert hashed == []
    for num_blocks in (1, 0, 1, 2, 2):
        names.extend(num_blocks)
    assert len(hashed) == len(names.names) == 2
    assert [hash_block(payload) for payload in hashed] == names.names
    assert all(len(name) * 8 == 256 for name in names.names), "names stand for their tokens: none may collide"


def test_names_follow_a_sequence_that_grows() -> None:
    token_ids = TOKENS[:5]
    names = BlockNames(token_ids, ROOT, 4)
    names.extend(1)
    for token_id in TOKENS[5:]:
        token_ids.append(token_id)
    names.extend(2)
    assert names.names == name_blocks(TOKENS)


def test_any_sequence_of_integers_will_do() -> None:
    for token_ids in (tuple(TOKENS), np.array(TOKENS)):
        names = BlockNames(token_ids, ROOT, 4)
        names.extend(2)
        assert names.names == name_blocks(TOKENS)
