"""That all shards of a model decide alike, step by step; nothing to do for a backend that serves a model alone."""

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
    """Compares a digest of everything decided so far, before each step runs.

    Before, and not now and then: collectives of different sizes, which is what shards with different plans would run,
    hang or end the process without a word. It is one collective of eight bytes a step, beside two in each layer of the
    model.
    """

    def __init__(self, group: ShardGroup | None) -> None:
        self._group = group
        self._digest = hashlib.blake2b(digest_size=8)

    def derive_seed(self, arrival: int) -> int | None:
        """What a request without a seed of its own samples by; None leaves it to chance."""
        return None if self._group is None else self._group.derive_seed(arrival)

    def check_plan(self, plan: StepPlan) -> None:
        """Raises ShardError, on all shards, when they have not decided the same up to here."""
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
        """For the execution of a plan. Raises ShardError, on all shards, where it fails on one: the others wait for it
        in the middle of the model and can't be brought back."""
        if self._group is None:
            yield
            return
        with self._group.step(f"step {plan.step}"):
            yield

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """As `running`, for the warm-up, which finds on all shards alike that the cache is too small."""
        if self._group is None:
            yield
            return
        with self._group.collective("the warm-up", (CapacityError,)):
            yield

    def note_tokens(self, sampled: Mapping[RequestId, SampledToken]) -> None:
        """Takes a step's tokens into the digest, to be compared before the next one."""
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
    """A prompt's chunk comes with its whole table; to a running row's, a token adds one block at the most."""
    return list(row.block_table[-1:] if row.num_tokens == 1 else row.block_table)
