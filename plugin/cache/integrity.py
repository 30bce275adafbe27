"""Recomputes a cache manager's bookkeeping from its block tables, in a slow and simple way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.cache.block_pool import BlockPool
from pagedkv.plugin.cache.prefix_index import PrefixIndex
from pagedkv.plugin.cache.sequence_blocks import SequenceBlocks
from pagedkv.plugin.errors import IntegrityError


def check_integrity(
    sequences: Collection[SequenceBlocks], pool: BlockPool, index: PrefixIndex, block_size: int
) -> None:
    """Compares the pool and the index with the open sequences.

    Raises:
        IntegrityError: see `CacheManager.check_integrity`.
    """
    for sequence in sequences:
        _check_table(sequence, block_size)
        _check_names(sequence, index, block_size)
    num_holders = Counter(block for sequence in sequences for block in _held_blocks(sequence))
    pool.check_integrity(num_holders)
    index.check_integrity(Counter(name for sequence in sequences for name in _expected_names(sequence)))
    for block in index.named_blocks():
        if pool.ref_counts[block] == 0 and not pool.is_cached(block):
            raise IntegrityError(f"block {block} has a name, but is free")


def count_used_slots(sequences: Iterable[SequenceBlocks], block_size: int) -> int:
    """Slots that hold a token of a sequence, or of a copy that has not run; a shared block counts once."""
    num_filled: dict[int, int] = {}
    for sequence in sequences:
        for position, block in enumerate(sequence.block_table):
            filled = min(block_size, max(0, sequence.num_computed_tokens - position * block_size))
            num_filled[block] = max(num_filled.get(block, 0), filled)
        if sequence.copy_source is not None:
            filled = sequence.num_computed_tokens % block_size
            num_filled[sequence.copy_source] = max(num_filled.get(sequence.copy_source, 0), filled)
    return sum(num_filled.values())


def _held_blocks(sequence: SequenceBlocks) -> Iterator[int]:
    yield from sequence.block_table
    if sequence.copy_source is not None:
        yield sequence.copy_source


def _expected_names(sequence: SequenceBlocks) -> list[bytes]:
    return sequence.names.names[sequence.num_published_blocks : sequence.num_expected_blocks]


def _check_table(sequence: SequenceBlocks, block_size: int) -> None:
    table = sequence.block_table
    if len(set(table)) != len(table):
        raise IntegrityError(f"a block is twice in one block table: {table.tolist()}")
    if sequence.num_computed_tokens > min(len(table) * block_size, len(sequence.token_ids)):
        raise IntegrityError(
            f"{sequence.num_computed_tokens} tokens are computed of {len(sequence.token_ids)}, in {len(table)} blocks"
        )


def _check_names(sequence: SequenceBlocks, index: PrefixIndex, block_size: int) -> None:
    num_full_blocks = sequence.num_computed_tokens // block_size
    recomputed = BlockNames(sequence.token_ids, sequence.names.root, block_size)
    for position, block in enumerate(sequence.block_table):
        name = index.find_name(block)
        if name is None:
            continue
        # A fork may hold a named block and share only a part of it, as long as it can't write there.
        if position >= num_full_blocks and sequence.num_writable_tokens > position * block_size:
            raise IntegrityError(f"block {block} has a name, but is not full")
        if position >= num_full_blocks:
            continue
        recomputed.extend(position + 1)
        if name != recomputed.names[position]:
            raise IntegrityError(f"block {block} has the name of other tokens than it holds")
