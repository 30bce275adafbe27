"""The router's own account of a server's blocks: which numbers it hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Allocation:
    blocks: list[int]
    slots: list[int]
    num_cached_tokens: int
    prompt_ids: Sequence[int] | None
    """None where the prompt is neither looked up nor kept."""
    path: list[_Node] = field(default_factory=list)
    """The cached prefix, held until the allocation is freed."""


class Allocator(Protocol):
    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None) -> Allocation | None: ...

    def free(self, allocation: Allocation) -> None: ...


def _slots(blocks: list[int], block_size: int, num_tokens: int) -> list[int]:
    return [block * block_size + offset for block in blocks for offset in range(block_size)][:num_tokens]


class BlockList:
    """Blocks 1 to N − 1 without memory: use_prefix_caching=false. Block 0 is kept back for health probes."""

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None) -> None:
        self._block_size = block_size
        self._window_size = window_size
        self._free = list(range(1, num_blocks))

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None) -> Allocation | None:
        num_kept_tokens = min(num_tokens, self._window_size or num_tokens)
        num_blocks = -(-num_kept_tokens // self._block_size)
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num_blocks)][::-1]
        num_rounds = -(-num_tokens // num_kept_tokens)
        return Allocation(blocks, _slots(blocks * num_rounds, self._block_size, num_tokens), 0, None)

    def free(self, allocation: Allocation) -> None:
        self._free += allocation.blocks


@dataclass(eq=False)
class _Node:
    """One full block of some prompt."""

    block: int
    parent: _Node | None
    key: tuple[int, ...]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    num_holders: int = 0
    last_use: int = 0


class RadixTree:
    """Remembers the full blocks of ended prompts: use_prefix_caching=true.

    A prompt enters when its request's allocation is freed, however the request ended, so that what it tells a server to
    be cached may never have been computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(1, num_blocks))
        self._root = _Node(0, None, ())
        self._time = 0

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None) -> Allocation | None:
        path = [] if prompt_ids is None else self._find(prompt_ids)
        for node in path:
            node.num_holders += 1
        num_cached_tokens = len(path) * self._block_size
        num_blocks = -(-(num_tokens - num_cached_tokens) // self._block_size)
        # What is evicted in vain stays evicted.
        while len(self._free) < num_blocks and self._evict_one():
            pass
        if len(self._free) < num_blocks:
            for node in path:
                node.num_holders -= 1
            return None
        own = [self._free.pop() for _ in range(num_blocks)][::-1]
        blocks = [node.block for node in path] + own
        return Allocation(blocks, _slots(blocks, self._block_size, num_tokens), num_cached_tokens, prompt_ids, path)

    def free(self, allocation: Allocation) -> None:
        for node in allocation.path:
            node.num_holders -= 1
        num_cached, num_full = len(allocation.path), len(allocation.prompt_ids or ()) // self._block_size
        self._time += 1
        node = self._root
        for index in range(num_full):
            key = self._key(allocation.prompt_ids or (), index)
            if key not in node.children:
                node.children[key] = _Node(allocation.blocks[index], node, key, last_use=self._time)
            elif index >= num_cached:
                # Another request with the same beginning was freed meanwhile.
                self._free.append(allocation.blocks[index])
            node = node.children[key]
            node.last_use = self._time
        self._free += allocation.blocks[max(num_full, num_cached) :]

    def _key(self, prompt_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(prompt_ids[index * self._block_size : (index + 1) * self._block_size])

    def _find(self, prompt_ids: Sequence[int]) -> list[_Node]:
        self._time += 1
        path: list[_Node] = []
        node = self._root
        for index in range(len(prompt_ids) // self._block_size):
            key = self._key(prompt_ids, index)
            if key not in node.children:
                break
            node = node.children[key]
            node.last_use = self._time
            path.append(node)
        return path

    def _evict_one(self) -> bool:
        """Gives back the least recently used block that nobody holds and that begins nothing longer."""
        leaves = [node for node in self._nodes() if not node.children and not node.num_holders]
        if not leaves:
            return False
        oldest = min(leaves, key=lambda node: node.last_use)
        assert oldest.parent is not None
        del oldest.parent.children[oldest.key]
        self._free.append(oldest.block)
        return True

    def _nodes(self) -> list[_Node]:
        nodes = list(self._root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes
