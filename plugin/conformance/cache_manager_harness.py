"""Runs a cache manager over a memory of plain values, and checks every answer against the rules.

The memory keeps, for each slot, a number for the namespace and all tokens up to the slot's, on which the KV there
depends. A cached token whose slot holds anything else, a copy that came too late, and a block with two writers are
detected at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedkv.plugin.interface import BlockGrant, BlockPlan, CacheManager
from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.step_plan import BlockCopy

DEFAULT_NAMESPACE = CacheNamespace()


@dataclass
class OpenSequence:
    """The harness's own state of a sequence."""

    token_ids: list[int]
    namespace: CacheNamespace
    may_reuse_prefix: bool
    num_computed_tokens: int = 0
    num_granted_tokens: int = 0
    """Slots that the running step may write end here; equal to the computed tokens between steps."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Granted copies, to run before the step writes."""
    contents: list[int] = field(default_factory=list)
    """For each token, what its slot must hold."""


class CacheManagerHarness:
    """Drives one cache manager as a scheduler and a backend would: several grants, then one step that writes."""

    def __init__(self, manager: CacheManager, num_blocks: int, block_size: int) -> None:
        self.manager = manager
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sequences: dict[RequestId, OpenSequence] = {}
        self._slots: dict[int, int] = {}
        # Numbers of prefixes: by the namespace, or by the number of the shorter prefix and the token after it.
        self._numbers: dict[CacheNamespace | tuple[int, int], int] = {}
        self._next_id = 0

    def open(
        self,
        token_ids: Sequence[int],
        namespace: CacheNamespace = DEFAULT_NAMESPACE,
        *,
        may_reuse_prefix: bool = True,
        is_readmission: bool = False,
    ) -> RequestId:
        """Opens a sequence under a fresh id."""
        seq_id = RequestId(self._next_id)
        self._next_id += 1
        sequence = OpenSequence(list(token_ids), namespace, may_reuse_prefix)
        self.manager.open(
            seq_id,
            sequence.token_ids,
            namespace,
            may_reuse_prefix=may_reuse_prefix,
            is_readmission=is_readmission,
        )
        self.sequences[seq_id] = sequence
        return seq_id

    def plan(self, seq_id: RequestId, num_tokens: int) -> BlockPlan:
        """Calls `plan`, and checks that it changes nothing."""
        before = self._snapshot()
        plan = self.manager.plan(seq_id, num_tokens)
        assert self._snapshot() == before, "plan changed something"
        sequence = self.sequences[seq_id]
        if sequence.num_computed_tokens or not sequence.may_reuse_prefix:
            assert plan.num_cached_tokens == 0, "only a sequence without blocks that may reuse its prefix has a hit"
        assert 0 <= plan.num_cached_tokens <= plan.num_pending_tokens
        assert plan.num_pending_tokens < len(sequence.token_ids), "the last known token must be computed"
        return plan

    def acquire(self, seq_id: RequestId, num_tokens: int) -> BlockGrant | None:
        """Acquires blocks as planned. The next `run_step` writes the grant."""
        sequence = self.sequences[seq_id]
        plan = self.plan(seq_id, num_tokens)
        before = self._snapshot()
        grant = self.manager.acquire(seq_id, num_tokens)
        if grant is None:
            assert plan.num_missing_blocks > 0, "the plan found room, but acquire did not"
            assert self._snapshot() == before, "a refused acquire changed something"
            return None
        assert plan.num_missing_blocks == 0, "the plan found no room, but acquire did"
        assert grant.num_cached_tokens == plan.num_cached_tokens
        if grant.num_cached_tokens:
            sequence.num_computed_tokens = grant.num_cached_tokens
        sequence.num_granted_tokens = max(sequence.num_granted_tokens, sequence.num_computed_tokens, num_tokens)
        sequence.copies += grant.copies
        table = self.manager.block_table(seq_id)
        assert len(table) * self.block_size >= sequence.num_granted_tokens, "the block table is too short"
        assert len(set(table)) == len(table), "a block is twice in one table"
        assert all(0 <= block < self.num_blocks for block in table)
        return grant

    def run_step(self) -> None:
        """Runs the granted copies, writes the granted slots, commits, and checks everything that is stored."""
        self._run_copies()
        for seq_id, sequence in self.sequences.items():
            contents = self._contents(sequence)
            for position in range(sequence.num_computed_tokens, sequence.num_granted_tokens):
                self._slots[self._slot(seq_id, position)] = contents[position]
        for seq_id, sequence in self.sequences.items():
            if sequence.num_granted_tokens > sequence.num_computed_tokens:
                sequence.num_computed_tokens = sequence.num_granted_tokens
                self.manager.commit(seq_id, sequence.num_computed_tokens)
            sequence.copies.clear()
        self.check()

    def fail_step(self) -> None:
        """Makes the step fail in the middle: releases every sequence with a grant, whose slots are undefined."""
        granted = [
            seq_id
            for seq_id, sequence in self.sequences.items()
            if sequence.num_granted_tokens > sequence.num_computed_tokens
        ]
        self._run_copies()
        for seq_id in granted:
            sequence = self.sequences[seq_id]
            for position in range(sequence.num_computed_tokens, sequence.num_granted_tokens):
                self._slots.pop(self._slot(seq_id, position), None)
        for seq_id in granted:
            self.release(seq_id)

    def compute(self, seq_id: RequestId, num_tokens: int | None = None) -> int:
        """Acquires up to `num_tokens` (default: all known ones) and runs the step. The pool must have enough blocks.

        Returns:
            The number of tokens that were found instead of computed.
        """
        grant = self.acquire(seq_id, len(self.sequences[seq_id].token_ids) if num_tokens is None else num_tokens)
        assert grant is not None, "the pool is too small for this test"
        self.run_step()
        return grant.num_cached_tokens

    def append(self, seq_id: RequestId, token_id: int) -> None:
        self.sequences[seq_id].token_ids.append(token_id)

    def fork(self, parent_id: RequestId, child_id: RequestId, num_tokens: int) -> int:
        """Forks, and checks how many tokens are shared."""
        parent, child = self.sequences[parent_id], self.sequences[child_id]
        num_shared = self.manager.fork(parent_id, child_id, num_tokens)
        child.num_computed_tokens = child.num_granted_tokens = num_shared
        assert 0 <= num_shared <= min(num_tokens, parent.num_computed_tokens, len(child.token_ids) - 1)
        assert child.token_ids[:num_shared] == parent.token_ids[:num_shared], "tokens that differ are shared"
        return num_shared

    def release(self, seq_id: RequestId) -> None:
        """Ends a sequence and drops its copies, whether a step has run since its grant or not."""
        self.manager.release(seq_id)
        del self.sequences[seq_id]

    def preempt(self, seq_id: RequestId) -> RequestId:
        """Releases a sequence and opens a new one with the same tokens, to compute them again."""
        sequence = self.sequences[seq_id]
        self.release(seq_id)
        return self.open(
            sequence.token_ids,
            sequence.namespace,
            may_reuse_prefix=sequence.may_reuse_prefix,
            is_readmission=True,
        )

    def check(self) -> None:
        """Checks the manager's own bookkeeping, its counts, and the content of every computed token."""
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.num_total_blocks == self.num_blocks
        assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks == self.num_blocks
        if any(sequence.copies for sequence in self.sequences.values()):
            return  # a copy's source may be held, and its target has no content yet
        num_filled = self._count_filled_slots()
        assert stats.num_used_blocks == len(num_filled)
        assert stats.num_used_slots == sum(num_filled.values())
        for seq_id, sequence in self.sequences.items():
            contents = self._contents(sequence)
            for position in range(sequence.num_computed_tokens):
                assert self._slots.get(self._slot(seq_id, position)) == contents[position], (
                    f"the slot of token {position} of sequence {seq_id} does not hold its KV"
                )

    def _contents(self, sequence: OpenSequence) -> list[int]:
        numbers, contents = self._numbers, sequence.contents
        for token_id in sequence.token_ids[len(contents) :]:
            before = contents[-1] if contents else numbers.setdefault(sequence.namespace, len(numbers))
            contents.append(numbers.setdefault((before, token_id), len(numbers)))
        return contents

    def _slot(self, seq_id: RequestId, position: int) -> int:
        block = self.manager.block_table(seq_id)[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _count_filled_slots(self) -> dict[int, int]:
        """For each block that a sequence holds: the number of slots that hold a token of a sequence."""
        num_filled: dict[int, int] = {}
        for seq_id, sequence in self.sequences.items():
            for index, block in enumerate(self.manager.block_table(seq_id)):
                filled = min(self.block_size, max(0, sequence.num_computed_tokens - index * self.block_size))
                num_filled[block] = max(num_filled.get(block, 0), filled)
        return num_filled

    def _run_copies(self) -> None:
        copies = [copy for sequence in self.sequences.values() for copy in sequence.copies]
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets), "two copies have one target"
        assert not set(targets) & {copy.source for copy in copies}, "a copy's target is another's source"
        for copy in copies:
            for offset in range(self.block_size):
                self._slots.pop(copy.target * self.block_size + offset, None)
                content = self._slots.get(copy.source * self.block_size + offset)
                if content is not None:
                    self._slots[copy.target * self.block_size + offset] = content

    def _snapshot(self) -> object:
        return self.manager.stats(), {seq_id: list(self.manager.block_table(seq_id)) for seq_id in self.sequences}
