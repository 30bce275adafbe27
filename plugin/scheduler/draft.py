"""A step while it is being decided: rows can still be dropped, and give their tokens back to the budget."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.interface import CacheManager
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.scheduler.sequence import SequenceState
from pagedkv.plugin.step_plan import BlockCopy, ScheduledSequence, StepPlan


@dataclass(slots=True)
class DraftRow:
    sequence: SequenceState
    num_tokens: int
    copies: tuple[BlockCopy, ...]


class StepDraft:
    """Rows, copies and preemptions of the step that is being decided."""

    def __init__(self, max_step_tokens: int) -> None:
        self.num_tokens_left = max_step_tokens
        """Of the budget."""
        self.is_cache_full = False
        """Whether a running sequence asked for blocks in vain, if only at first."""
        self.preempted: list[RequestId] = []
        self._rows: dict[RequestId, DraftRow] = {}

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence.id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, sequence: SequenceState, num_tokens: int, copies: tuple[BlockCopy, ...]) -> None:
        self._rows[sequence.id] = DraftRow(sequence, num_tokens, copies)
        self.num_tokens_left -= num_tokens

    def drop(self, sequence: SequenceState) -> None:
        """Takes a sequence out that lost its blocks, and its copies with it: their targets are others' blocks now."""
        row = self._rows.pop(sequence.id, None)
        if row is not None:
            self.num_tokens_left += row.num_tokens
        self.preempted.append(sequence.id)

    def build(self, step: int, cache: CacheManager) -> StepPlan:
        """The plan; rows with one token come first, older before newer."""
        rows = sorted(self._rows.values(), key=lambda row: (row.num_tokens != 1, row.sequence.arrival))
        return StepPlan(
            step=step,
            scheduled=tuple(_schedule_row(row, cache) for row in rows),
            copies=tuple(copy for row in rows for copy in row.copies),
            preempted=tuple(self.preempted),
        )


def _schedule_row(row: DraftRow, cache: CacheManager) -> ScheduledSequence:
    sequence = row.sequence
    assert sequence.num_cached_tokens is not None
    return ScheduledSequence(
        id=sequence.id,
        start=sequence.num_computed_tokens,
        num_tokens=row.num_tokens,
        block_table=cache.block_table(sequence.id),
        is_last_chunk=row.num_tokens == sequence.num_tokens_left,
        num_cached_tokens=sequence.num_cached_tokens,
    )
