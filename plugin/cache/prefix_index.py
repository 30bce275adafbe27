"""Which block holds the content of a name, and which names are about to get one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pagedkv.plugin.cache.block_names import BlockNames
from pagedkv.plugin.errors import IntegrityError


class PrefixIndex:
    """Names and blocks, one to one. A block enters with content that is written, and leaves when it is evicted."""

    __slots__ = ("_block_of", "_entry_of", "_num_writers")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        # By block: its name and the payload that the name is the hash of.
        self._entry_of: dict[int, tuple[bytes, bytes]] = {}
        # By name: how many sequences hold a block that they will fill with its content.
        self._num_writers: dict[bytes, int] = {}

    def find(self, name: bytes, payload: bytes) -> int | None:
        """The block with this content. The payload is compared: a collision of names is a miss."""
        block = self._block_of.get(name)
        if block is None or self._entry_of[block][1] != payload:
            return None
        return block

    def find_prefix(self, names: BlockNames, max_blocks: int) -> list[int]:
        """The blocks that hold a sequence's beginning, up to the first that is not findable."""
        blocks: list[int] = []
        for position in range(max_blocks):
            if position == len(names.names):
                # Doubling: a miss at once computes one name, a long hit takes few calls.
                names.extend(min(max_blocks, 2 * position + 1))
            block = self.find(names.names[position], names.payloads[position])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_pending_prefix(self, names: BlockNames, num_found: int, max_blocks: int) -> int:
        """Blocks of a sequence's beginning, `num_found` of them found, up to the first that nobody has or fills."""
        for position in range(num_found, max_blocks):
            names.extend(position + 1)
            name = names.names[position]
            if name not in self._num_writers and self.find(name, names.payloads[position]) is None:
                return position
        return max(num_found, max_blocks)

    def publish(self, block: int, name: bytes, payload: bytes) -> None:
        """Makes a written block findable, unless the name is taken."""
        assert block not in self._entry_of, f"block {block} has a name already"
        if name not in self._block_of:
            self._block_of[name] = block
            self._entry_of[block] = (name, payload)

    def forget(self, block: int) -> None:
        """Makes a block that has a name unfindable."""
        name, _ = self._entry_of.pop(block)
        del self._block_of[name]

    def is_named(self, block: int) -> bool:
        return block in self._entry_of

    def find_payload(self, block: int) -> bytes | None:
        """What a block's name is the hash of; None for a block without a name."""
        entry = self._entry_of.get(block)
        return entry[1] if entry else None

    def named_blocks(self) -> Iterator[int]:
        return iter(self._entry_of)

    def expect(self, names: Iterable[bytes]) -> None:
        """A sequence will fill blocks with these names."""
        num_writers = self._num_writers
        for name in names:
            num_writers[name] = num_writers.get(name, 0) + 1

    def stop_expecting(self, names: Iterable[bytes]) -> None:
        """Takes back `expect` of one sequence: it has filled the blocks, or will not."""
        num_writers = self._num_writers
        for name in names:
            left = num_writers[name] - 1
            if left:
                num_writers[name] = left
            else:
                del num_writers[name]

    def check_integrity(self, num_writers: Counter[bytes]) -> None:
        """Compares with writers counted from the sequences.

        Raises:
            IntegrityError: names and blocks are not one to one, or a name waits for the wrong number of writers.
        """
        backward = {name: block for block, (name, _) in self._entry_of.items()}
        if backward != self._block_of or len(backward) != len(self._entry_of):
            raise IntegrityError(f"{len(self._block_of)} names and {len(self._entry_of)} blocks are not one to one")
        if self._num_writers != num_writers:
            raise IntegrityError("the names that sequences are about to fill are not those expected")
