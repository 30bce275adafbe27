"""Decides whether a waiting sequence can be admitted: whether its tokens are cached, and whether blocks suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pagedkv.plugin.interface import CacheManager
from pagedkv.plugin.scheduler.draft import StepDraft
from pagedkv.plugin.scheduler.growth import GrowthPromises, num_tokens_grown
from pagedkv.plugin.scheduler.recompute import RecomputeMeter
from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress


class Decision(Enum):
    ADMIT = "admit"
    DEFER = "defer"
    """Another sequence is computing the prefix that this one needs: admit others first, try again in the next step."""
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Admission:
    decision: Decision
    num_cached_tokens: int = 0
    """Tokens that need not be computed."""
    fork_from: SequenceProgress | None = None
    """The parent to share blocks with, if that gives more tokens than the prefix lookup."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Admits a sequence if the cache has blocks for all its known tokens, not only for its first chunk, and for growth.

    Growth is one block for the new sequence and for each running one, and twice as much after each preemption of the
    new sequence. All sequences grow at the same pace, so a sequence that was preempted p times runs for about
    block_size × 2**p steps before it can be preempted again: the number of its preemptions grows with the logarithm of
    its output. While recomputing costs too much, growth is at least half of what a sequence may still generate.
    """

    cache: CacheManager
    block_size: int
    recompute_meter: RecomputeMeter
    promises: GrowthPromises

    def consider(
        self,
        sequence: SequenceProgress,
        running: Sequence[SequenceProgress],
        draft: StepDraft,
    ) -> Admission:
        """Decides what to do with a waiting sequence now. Changes nothing."""
        parent = sequence.parent
        num_forkable_tokens = 0
        if parent is not None and parent.is_running:
            if parent in draft and parent.num_computed_tokens < sequence.num_shareable_tokens:
                return Admission(Decision.DEFER)
            num_forkable_tokens = min(parent.num_computed_tokens, sequence.num_shareable_tokens)
        num_slots = self._num_slots_wanted(sequence, running)
        plan = self.cache.plan(sequence.id, num_slots)
        # Without a row in this step no sequence computes the pending tokens now: the one that holds them is blocked.
        if len(draft) and plan.num_pending_tokens > max(plan.num_cached_tokens, num_forkable_tokens):
            return Admission(Decision.DEFER)
        if num_forkable_tokens <= plan.num_cached_tokens:
            decision = Decision.NO_ROOM if plan.num_missing_blocks else Decision.ADMIT
            return Admission(decision, plan.num_cached_tokens)
        num_gained_blocks = (num_forkable_tokens - plan.num_cached_tokens) // self.block_size
        has_room = plan.num_missing_blocks <= num_gained_blocks
        return Admission(Decision.ADMIT if has_room else Decision.NO_ROOM, num_forkable_tokens, parent)

    def _num_slots_wanted(self, sequence: SequenceProgress, running: Sequence[SequenceProgress]) -> int:
        """Slots of the new sequence, and whole blocks for the growth of the running ones."""
        min_growth_tokens = self.block_size << sequence.num_preemptions
        is_careful = self.recompute_meter.is_exceeded
        num_promised_blocks = self.promises.num_blocks(running, min_growth_tokens, is_careful)
        return num_tokens_grown(sequence, min_growth_tokens, is_careful) + num_promised_blocks * self.block_size
