"""A step that is being planned. Rows can still be removed, which returns their tokens to the budget."""

from __future__ import annotations

from pagedkv.plugin.interface import CacheManager
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress
from pagedkv.plugin.step_plan import BlockCopy, ScheduledSequence, StepPlan


class StepDraft:
    """Rows, copies and preemptions of the step that is being planned."""

    def __init__(self, max_step_tokens: int) -> None:
        self.num_tokens_left = max_step_tokens
        """Tokens left in the step's budget."""
        self.is_cache_full = False
        """Whether a running sequence did not get blocks at its first try."""
        self.preempted: list[RequestId] = []
        self._rows: dict[RequestId, tuple[SequenceProgress, int]] = {}
        """By sequence id: the sequence and its number of tokens in the step."""
        self._copies: dict[RequestId, tuple[BlockCopy, ...]] = {}

    def __contains__(self, sequence: SequenceProgress) -> bool:
        return sequence.id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def chunks(self) -> list[SequenceProgress]:
        """Sequences whose rows are not their last tokens, oldest first."""
        cut = (sequence for sequence, num_tokens in self._rows.values() if num_tokens < sequence.num_tokens_left)
        return sorted(cut, key=lambda sequence: sequence.arrival)

    def add(self, sequence: SequenceProgress, num_tokens: int, copies: tuple[BlockCopy, ...]) -> None:
        self._rows[sequence.id] = (sequence, num_tokens)
        self.num_tokens_left -= num_tokens
        if copies:
            self._copies[sequence.id] = copies

    def extend(self, sequence: SequenceProgress, num_tokens: int) -> None:
        """Adds tokens to a sequence's row."""
        self._rows[sequence.id] = (sequence, self._rows[sequence.id][1] + num_tokens)
        self.num_tokens_left -= num_tokens

    def drop(self, sequence: SequenceProgress) -> None:
        """Removes a sequence that lost its blocks, and its copies: other sequences may hold their targets now."""
        _, num_tokens = self._rows.pop(sequence.id, (sequence, 0))
        self.num_tokens_left += num_tokens
        self._copies.pop(sequence.id, None)
        self.preempted.append(sequence.id)

    def build(self, step: int, cache: CacheManager) -> StepPlan:
        """Returns the plan. Rows with one token come first, older before newer."""
        rows = sorted(self._rows.values(), key=_plan_order)
        return StepPlan(
            step=step,
            scheduled=tuple([_schedule_row(sequence, num_tokens, cache) for sequence, num_tokens in rows]),
            copies=tuple(copy for copies in self._copies.values() for copy in copies),
            preempted=tuple(self.preempted),
        )


def _plan_order(row: tuple[SequenceProgress, int]) -> tuple[bool, int]:
    sequence, num_tokens = row
    return num_tokens != 1, sequence.arrival


def _schedule_row(sequence: SequenceProgress, num_tokens: int, cache: CacheManager) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    assert sequence.num_cached_tokens is not None
    return ScheduledSequence(
        id=sequence.id,
        start=start,
        num_tokens=num_tokens,
        block_table=cache.block_table(sequence.id),
        is_last_chunk=start + num_tokens == len(sequence.token_ids),
        num_cached_tokens=sequence.num_cached_tokens,
    )
