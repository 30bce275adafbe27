"""What a scheduler decides for one step. A sequence is a request that a backend has taken; they share the id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from pagedkv.plugin.requests import CacheNamespace, RequestId

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence as the scheduler first hears of it."""

    id: RequestId
    prompt_ids: Sequence[int]
    max_new_tokens: int
    namespace: CacheNamespace
    parent_id: RequestId | None = None
    """Fork from this live sequence: see `Request.parent_id`."""
    may_reuse_prefix: bool = True
    """False where every prompt token must be computed, as for prompt log-probabilities."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the content of `source` goes to `target`, scales too, before anything is stored in the step."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens [start, start + num_tokens) of a sequence run in this step."""

    id: RequestId
    start: int
    """num_computed_tokens before the step."""
    num_tokens: int
    block_table: Sequence[int]
    """Covers start + num_tokens tokens; read only, and only until the step is committed."""
    is_last_chunk: bool
    """Whether num_computed_tokens catches up with num_tokens, so that a token is sampled."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at the sequence's first admission."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows with one token come first. Empty when nothing can or need run."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    """Sequences that lost their blocks in this step; they wait to be computed again."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled)
