"""The pool of blocks and their reference counts. Every operation takes constant time a block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pagedkv.plugin.errors import IntegrityError


class BlockPool:
    """A pool of the blocks 0 … num_blocks - 1.

    A block is free (reference count 0, no content), cached (reference count 0, content kept until it is evicted) or
    used (reference count at least 1). Methods do not check whether enough blocks are there: the caller has counted.
    """

    __slots__ = ("_cached", "_free", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        """Reference count of each block; read only."""
        # A stack: the memory of the block freed last is still in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently used first. To find its first entry, a plain dict would walk past all deleted ones.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, with reference count 1."""
        assert num_blocks <= len(self._free), "the caller counts, and evicts first"
        split = len(self._free) - num_blocks
        blocks = self._free[split:]
        del self._free[split:]
        blocks.reverse()
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a cached or used block."""
        if self.ref_counts[block] == 0:
            if block not in self._cached:
                raise IntegrityError(f"block {block} is free; only a block with content can be shared")
            del self._cached[block]
        self.ref_counts[block] += 1

    def release(self, block: int, *, keep_content: bool) -> None:
        """Removes a reference. At 0, a block whose content is kept becomes cached, as the most recently used.

        Raises:
            IntegrityError: the reference count is 0 already.
        """
        ref_count = self.ref_counts[block]
        if ref_count == 0:
            raise IntegrityError(f"block {block} is released, but nobody holds it")
        self.ref_counts[block] = ref_count - 1
        if ref_count == 1:
            if keep_content:
                self._cached[block] = None
            else:
                self._free.append(block)

    def touch(self, block: int) -> None:
        """Marks a block as the most recently used one, if it is cached."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def evict(self) -> int:
        """Frees the least recently used cached block and returns its id."""
        block, _ = self._cached.popitem(last=False)
        self._free.append(block)
        return block

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def check_integrity(self, num_holders: Mapping[int, int]) -> None:
        """Compares the pool with reference counts taken from the block tables.

        Raises:
            IntegrityError: a wrong reference count; free, cached and used blocks overlap or do not sum to all.
        """
        for block, ref_count in enumerate(self.ref_counts):
            if ref_count != num_holders.get(block, 0):
                raise IntegrityError(
                    f"block {block} has reference count {ref_count}, but {num_holders.get(block, 0)} holders"
                )
        states = [*self._free, *self._cached, *(block for block, count in enumerate(self.ref_counts) if count)]
        if sorted(states) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"free ({len(self._free)}), cached ({len(self._cached)}) and used blocks are not each of the "
                f"{self.num_blocks} blocks once"
            )
