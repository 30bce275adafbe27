"""A scheduler's plan for one step. A sequence is a request that a backend has accepted; both have the same id.

A sequence has one list of token ids. The backend owns it and is the only one that appends to it: each sampled token,
before `Scheduler.commit`. Scheduler and cache manager keep that list by reference. Beside it each of the three has a
state of its own, because each is a plugin that can be replaced alone:

- the backend (`LiveSequence`): the tokens, how the request samples, and what its outputs report;
- the scheduler (`SequenceProgress`): its place in the queue, and how many of the tokens are computed;
- the cache manager (`SequenceBlocks`): the block table, and the names of the full blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import NewType

from pagedkv.plugin.requests import CacheNamespace, RequestId

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that is added to the scheduler."""

    id: RequestId
    token_ids: Sequence[int]
    """The caller's list of known tokens: the prompt when the sequence is added. The caller appends each sampled token
    before it commits the step. Keep the list, do not copy it, and never change it."""
    max_new_tokens: int
    namespace: CacheNamespace
    parent_id: RequestId | None = None
    """Fork from this live sequence: see `Request.parent_id`."""
    may_reuse_prefix: bool = True
    """False if every prompt token must be computed, as for prompt log-probabilities."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a block for copy-on-write: `source` is copied to `target`, with scales, before the step stores."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A row of a plan: the tokens [start, start + num_tokens) of a sequence run in this step."""

    id: RequestId
    start: int
    """num_computed_tokens before the step."""
    num_tokens: int
    block_table: Sequence[int]
    """Covers start + num_tokens tokens. Read only, and valid only until the step is committed."""
    is_last_chunk: bool
    """Whether num_computed_tokens catches up with num_tokens, so that a token is sampled."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at the sequence's first admission."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step. Rows with one token come first. Empty if no sequence can run."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    """Sequences whose blocks were taken in this step. They wait and are computed again."""
    features: frozenset[str] = frozenset()
    """What a backend must understand to run the plan, beyond version 1.0. A scheduler names in `plan_features` those
    that its plans may have, so that a backend that lacks one refuses it at start (`pagedkv.plugin.features`)."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled)


def count_common_tokens(first: Sequence[int], second: Sequence[int], max_tokens: int) -> int:
    """Returns the length of the common beginning of two sequences, at most `max_tokens`.

    >>> count_common_tokens([1, 2, 3], [1, 2, 4, 5], 9)
    2
    """
    head, other = first[:max_tokens], second[:max_tokens]
    return next(compress(count(), map(ne, head, other)), min(len(head), len(other)))
