"""Checks that all shards of a model make the same decisions in each step. Does nothing without shards."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pagedkv.plugin.distributed import ShardGroup
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.sampling.sampler import SampledToken
from pagedkv.plugin.step_plan import ScheduledSequence, StepPlan


class StepAgreement:
    """Compares a digest of all decisions so far between shards, before each step runs.

    It runs before each step because shards with different plans would run collectives of different sizes, which hang or
    end the process without a message. The cost is one collective of eight bytes a step, beside two in each layer of the
    model.
    """

    def __init__(self, group: ShardGroup | None) -> None:
        self._group = group
        self._digest = hashlib.blake2b(digest_size=8)

    def derive_seed(self, arrival: int) -> int | None:
        """Returns the seed for a request without one; None if a random one may be used."""
        return None if self._group is None else self._group.derive_seed(arrival)

    def check_plan(self, plan: StepPlan) -> None:
        """Raises ShardError, on all shards, if their decisions up to this plan differ."""
        if self._group is None:
            return
        self._digest.update(_describe_plan(plan))
        task = f"agreeing on step {plan.step}"
        with self._group.step(task):
            own = int.from_bytes(self._digest.copy().digest(), "little", signed=True)
            digests = self._group.gather(own)
        if len(set(digests)) > 1:
            ranks = ", ".join(f"rank {rank}: {digest & (2**64 - 1):016x}" for rank, digest in enumerate(digests))
            self._group.fail(
                f"the shards have decided differently by step {plan.step} ({ranks}): they got different calls, or run "
                "different versions or configs; restart all of them alike"
            )

    @contextmanager
    def running(self, plan: StepPlan) -> Iterator[None]:
        """Context manager for the execution of a plan. Raises ShardError on all shards if it fails on one.

        The other shards are blocked in the middle of the model and can't recover."""
        if self._group is None:
            yield
            return
        with self._group.step(f"step {plan.step}"):
            yield

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Like `running`, for the warm-up. All shards raise CapacityError together if the cache is too small."""
        if self._group is None:
            yield
            return
        with self._group.collective("the warm-up", (CapacityError,)):
            yield

    def note_tokens(self, sampled: Mapping[RequestId, SampledToken]) -> None:
        """Adds a step's tokens to the digest, which is compared before the next step."""
        if self._group is not None:
            ids = [number for id_, token in sampled.items() for number in (id_, token.token.token_id)]
            self._digest.update(array("Q", ids).tobytes())


def _describe_plan(plan: StepPlan) -> bytes:
    numbers = [plan.step, len(plan.scheduled), len(plan.copies), len(plan.preempted), *plan.preempted]
    for copy in plan.copies:
        numbers += copy.source, copy.target
    for row in plan.scheduled:
        numbers += row.id, row.start, row.num_tokens, row.is_last_chunk, len(row.block_table), *_changing_blocks(row)
    return array("Q", numbers).tobytes()


def _changing_blocks(row: ScheduledSequence) -> list[int]:
    """Blocks of a row to compare: the whole table for a prompt's chunk, the last block for a single token."""
    return list(row.block_table[-1:] if row.num_tokens == 1 else row.block_table)
