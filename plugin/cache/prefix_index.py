"""The index from names of block contents to blocks, and the names that running sequences are about to fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.errors import IntegrityError


class PrefixIndex:
    """Maps names to blocks, one to one. A block is added once its content is written, and removed at its eviction."""

    __slots__ = ("_block_of", "_name_of", "_num_writers")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # By name: number of sequences that hold a block which they will fill with this content.
        self._num_writers: dict[bytes, int] = {}

    def find(self, name: bytes) -> int | None:
        """Returns the block with the content of this name, or None."""
        return self._block_of.get(name)

    def find_prefix(self, names: BlockNames, max_blocks: int) -> list[int]:
        """Returns the blocks that hold a sequence's beginning, up to the first block that is not in the index."""
        blocks: list[int] = []
        for position in range(max_blocks):
            if position == len(names.names):
                # Double the number: an immediate miss computes one name, and a long hit takes few calls.
                names.extend(min(max_blocks, 2 * position + 1))
            block = self._block_of.get(names.names[position])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_pending_prefix(self, names: BlockNames, num_found: int, max_blocks: int) -> int:
        """Counts blocks of a sequence's beginning that are found (`num_found`) or that a running sequence will fill."""
        for position in range(num_found, max_blocks):
            names.extend(position + 1)
            name = names.names[position]
            if name not in self._num_writers and name not in self._block_of:
                return position
        return max(num_found, max_blocks)

    def publish(self, block: int, name: bytes) -> bool:
        """Adds a written block, unless another block has the name. Returns whether it did."""
        assert block not in self._name_of, f"block {block} has a name already"
        if name in self._block_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        return True

    def forget(self, block: int) -> bytes:
        """Removes a block that has a name, and returns the name."""
        name = self._name_of.pop(block)
        del self._block_of[name]
        return name

    def is_named(self, block: int) -> bool:
        return block in self._name_of

    def find_name(self, block: int) -> bytes | None:
        """Returns a block's name; None for a block without one."""
        return self._name_of.get(block)

    def named_blocks(self) -> Iterator[int]:
        return iter(self._name_of)

    def expect(self, names: Iterable[bytes]) -> None:
        """Records that a sequence will fill blocks with these names."""
        num_writers = self._num_writers
        for name in names:
            num_writers[name] = num_writers.get(name, 0) + 1

    def stop_expecting(self, names: Iterable[bytes]) -> None:
        """Undoes `expect` of one sequence: it has filled the blocks, or never will."""
        num_writers = self._num_writers
        for name in names:
            left = num_writers[name] - 1
            if left:
                num_writers[name] = left
            else:
                del num_writers[name]

    def check_integrity(self, num_writers: Counter[bytes]) -> None:
        """Compares the index with the writers counted from the sequences.

        Raises:
            IntegrityError: names and blocks are not one to one, or a name has the wrong number of expected writers.
        """
        backward = {name: block for block, name in self._name_of.items()}
        if backward != self._block_of or len(backward) != len(self._name_of):
            raise IntegrityError(f"{len(self._block_of)} names and {len(self._name_of)} blocks are not one to one")
        if self._num_writers != num_writers:
            raise IntegrityError("the names that sequences are about to fill are not those expected")
