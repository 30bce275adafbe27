"""The cache manager's state of one open sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.requests import CacheNamespace


class SequenceBlocks:
    """Block table and progress of a sequence. Only the cache manager changes it."""

    __slots__ = (
        "block_table",
        "copy_source",
        "is_counted",
        "may_reuse_prefix",
        "names",
        "namespace",
        "num_computed_tokens",
        "num_expected_blocks",
        "num_published_blocks",
        "num_writable_tokens",
        "publish_at_tokens",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        namespace: CacheNamespace,
        names: BlockNames,
        *,
        may_reuse_prefix: bool,
        is_counted: bool,
        publish_at_tokens: int,
    ) -> None:
        self.token_ids = token_ids
        self.namespace = namespace
        self.names = names
        self.may_reuse_prefix = may_reuse_prefix
        self.is_counted = is_counted
        """Whether its next lookup counts in the prefix counters."""
        self.block_table = array("i")
        self.num_computed_tokens = 0
        self.num_writable_tokens = 0
        """Every unwritten slot before this one is in a block that only this sequence holds: fast path of `acquire`."""
        self.publish_at_tokens = publish_at_tokens
        """Number of computed tokens at which the next unpublished block is full."""
        self.num_published_blocks = 0
        """Full blocks at the table's beginning that have been passed to the prefix index."""
        self.num_expected_blocks = 0
        """The index expects this sequence to fill blocks [num_published_blocks, num_expected_blocks)."""
        self.copy_source: int | None = None
        """The source block of a granted copy; referenced until the copy has run."""


def count_unfilled_slots(sequences: Iterable[SequenceBlocks], ref_counts: Sequence[int], block_size: int) -> int:
    """Counts slots of used blocks that hold no token. Looks only at the ends of the block tables."""
    num_unfilled = 0
    # By shared block: the numbers of filled slots of those sequences that do not fill it.
    num_filled_by_holder: dict[int, list[int]] = {}
    for sequence in sequences:
        index, offset = divmod(sequence.num_computed_tokens, block_size)
        num_unfilled += (len(sequence.block_table) - index) * block_size - offset
        if offset and ref_counts[sequence.block_table[index]] > 1:
            num_unfilled -= block_size - offset
            num_filled_by_holder.setdefault(sequence.block_table[index], []).append(offset)
        if sequence.copy_source is not None:
            num_filled_by_holder.setdefault(sequence.copy_source, []).append(offset)
    for block, num_filled in num_filled_by_holder.items():
        if len(num_filled) == ref_counts[block]:
            num_unfilled += block_size - max(num_filled)
    return num_unfilled
