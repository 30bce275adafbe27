"""How much the running sequences will grow: blocks that an admission must leave for them."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress


def num_tokens_grown(sequence: SequenceProgress, min_growth_tokens: int, is_careful: bool) -> int:
    """Slots of a sequence that has grown by `min_growth_tokens`; if careful, by half of what may be left at least."""
    num_growth_tokens = min_growth_tokens
    if is_careful:
        num_growth_tokens = max(num_growth_tokens, (sequence.max_cache_tokens - sequence.num_tokens) // 2)
    return sequence.num_tokens_after(num_growth_tokens)


class GrowthPromises:
    """Blocks that all running sequences still need to grow, summed once a step and not for each waiting sequence."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sums: dict[tuple[int, bool], int] = {}

    def clear(self) -> None:
        """Forgets the sums: to call when running sequences have changed in another way than by `add`."""
        self._sums.clear()

    def add(self, sequence: SequenceProgress) -> None:
        """Counts a sequence that now runs, too."""
        for growth, is_careful in self._sums:
            self._sums[growth, is_careful] += self._count_blocks(sequence, growth, is_careful)

    def num_blocks(self, running: Sequence[SequenceProgress], min_growth_tokens: int, is_careful: bool) -> int:
        """Blocks for the growth of all of `running`."""
        key = (min_growth_tokens, is_careful)
        if key not in self._sums:
            self._sums[key] = sum(self._count_blocks(one, *key) for one in running)
        return self._sums[key]

    def _count_blocks(self, sequence: SequenceProgress, min_growth_tokens: int, is_careful: bool) -> int:
        grown = num_tokens_grown(sequence, min_growth_tokens, is_careful)
        return -(-grown // self._block_size) - -(-sequence.num_acquired_tokens // self._block_size)
