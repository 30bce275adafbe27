"""Runs a scheduler and a cache manager over a memory of plain numbers, and checks every step against the rules.

The memory keeps, for each slot, a number that depends on the namespace and on all tokens up to the slot's, as a
model's KV does. A row reads every slot before its own through its block table, so that a wrong block, a missing copy or
a slot that was never written shows up at the first step that depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pagedkv.plugin.interface import CacheManager, Scheduler
from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.resolved_config import SchedulerSettings
from pagedkv.plugin.step_plan import NewSequence, ScheduledSequence, StepPlan

MakeReplica = Callable[[], tuple[Scheduler, CacheManager]]


def kv_of_token(previous_kv: int, token_id: int) -> int:
    """A number in place of a token's KV. It depends on all tokens before it."""
    return (previous_kv * 1_000_003 + token_id + 1) % (2**61 - 1)


def kv_of_namespace(namespace: CacheNamespace) -> int:
    """The number before the first token of a namespace."""
    kv = 1
    for byte in f"{len(namespace.salt)}:{namespace.salt}{namespace.adapter_id}".encode():
        kv = kv_of_token(kv, byte)
    return kv


def choose_token(kv: int, vocab_size: int) -> int:
    """The next token after a token with this KV, in place of a model's."""
    return (kv >> 7) % vocab_size


def generate_alone(
    prompt_ids: Sequence[int], num_new_tokens: int, vocab_size: int, namespace: CacheNamespace | None = None
) -> list[int]:
    """The right output of a sequence, computed without a cache."""
    kv = kv_of_namespace(namespace or CacheNamespace())
    for token_id in prompt_ids:
        kv = kv_of_token(kv, token_id)
    generated = [choose_token(kv, vocab_size)]
    while len(generated) < num_new_tokens:
        kv = kv_of_token(kv, generated[-1])
        generated.append(choose_token(kv, vocab_size))
    return generated


@dataclass
class ExpectedSequence:
    """The harness's own state of a sequence."""

    new: NewSequence
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    """The list that the scheduler got: only the harness may append to it."""
    num_computed_tokens: int = 0
    has_blocks: bool = False
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    steps: list[int] = field(default_factory=list)
    """Steps in which the sequence had a row."""

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)


class SchedulerHarness:
    """Drives one or more replicas of scheduler and cache with the same calls, and checks that all decide the same.

    Args:
        make_replica: makes a scheduler and the cache manager that it owns, with `settings`.
        num_replicas: two or more compare their plans.
        vocab_size: number of different tokens.
    """

    def __init__(
        self,
        make_replica: MakeReplica,
        settings: SchedulerSettings,
        num_replicas: int = 1,
        vocab_size: int = 1000,
    ) -> None:
        self.settings = settings
        self.replicas = [make_replica() for _ in range(num_replicas)]
        self.scheduler, self.cache = self.replicas[0]
        self.vocab_size = vocab_size
        self.live: dict[RequestId, ExpectedSequence] = {}
        self.ended: dict[RequestId, ExpectedSequence] = {}
        self.num_computed_tokens = 0
        """Total over all steps and sequences."""
        self._plans: list[StepPlan] = []
        self._memory: dict[int, int] = {}
        self._num_ids = 0

    def add(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        namespace: CacheNamespace | None = None,
        parent_id: RequestId | None = None,
        may_reuse_prefix: bool = True,
    ) -> RequestId:
        """Adds a sequence under a new id. Raises the scheduler's error, which must be the same in every replica."""
        token_ids = list(prompt_ids)
        new = NewSequence(
            RequestId(self._num_ids),
            token_ids,
            max_new_tokens,
            namespace or CacheNamespace(),
            parent_id,
            may_reuse_prefix,
        )
        for scheduler, _ in self.replicas:
            scheduler.add(new)
        self._num_ids += 1
        self.live[new.id] = ExpectedSequence(new, tuple(prompt_ids), token_ids)
        return new.id

    def schedule(self, only: Collection[RequestId] | None = None, max_chunk_tokens: int | None = None) -> StepPlan:
        """Schedules a step and checks the plan. If it has rows, call `finish_step` or `fail` next."""
        left = {
            id_ for id_, sequence in self.live.items() if len(sequence.token_ids) - sequence.num_computed_tokens == 1
        }
        plans = [scheduler.schedule(only, max_chunk_tokens) for scheduler, _ in self.replicas]
        described = [describe_plan(plan) for plan in plans]
        assert all(plan == described[0] for plan in described), "replicas given the same calls disagree"
        self._plans = plans
        self._check_plan(plans[0], only)
        if max_chunk_tokens is not None:
            chunk_tokens = sum(row.num_tokens for row in plans[0].scheduled if row.id not in left)
            assert chunk_tokens <= max_chunk_tokens, "the bound on prompts' tokens is exceeded"
        for id_ in plans[0].preempted:
            self._lose_blocks(self.live[id_])
        return plans[0]

    def finish_step(self) -> StepPlan:
        """Runs the scheduled step over the memory and commits it."""
        plan = self._plans[0]
        self._copy(plan)
        finished = []
        for row in plan.scheduled:
            token_id = self._run_row(row)
            sequence = self.live[row.id]
            if row.is_last_chunk:
                sequence.token_ids.append(token_id)
                if sequence.num_generated_tokens == sequence.new.max_new_tokens:
                    finished.append(row.id)
        known = {id_: tuple(sequence.token_ids) for id_, sequence in self.live.items()}
        for (scheduler, _), replica_plan in zip(self.replicas, self._plans, strict=True):
            scheduler.commit(replica_plan, finished)
        for id_, token_ids in known.items():
            assert tuple(self.live[id_].token_ids) == token_ids, "the scheduler changed the caller's list of tokens"
        for id_ in finished:
            self.ended[id_] = self.live.pop(id_)
        self.check_integrity()
        return plan

    def step(self, only: Collection[RequestId] | None = None) -> StepPlan:
        self.schedule(only)
        return self.finish_step()

    def fail(self) -> None:
        """Makes the scheduled step fail in the middle: its slots are undefined, its sequences have ended."""
        for row in self._plans[0].scheduled:
            for slot in self._slots(row, row.start, row.start + row.num_tokens):
                self._memory[slot] = -1
            del self.live[row.id]
        for (scheduler, _), plan in zip(self.replicas, self._plans, strict=True):
            scheduler.fail(plan)
        self.check_integrity()

    def abort(self, ids: Collection[RequestId]) -> None:
        for scheduler, _ in self.replicas:
            scheduler.abort(ids)
        for id_ in ids:
            self.live.pop(id_, None)
        self.check_integrity()

    def drain(self, max_steps: int = 100_000) -> int:
        """Runs steps until every sequence has ended with its tokens. Returns the number of steps."""
        num_steps = 0
        while self.live:
            assert num_steps < max_steps, f"{len(self.live)} sequences don't end"
            plan = self.step()
            assert plan.scheduled, "sequences are live, but nothing runs"
            num_steps += 1
        return num_steps

    def check_ended(self) -> None:
        """Checks that ended sequences have the right tokens, and that a scheduler without sequences holds no block."""
        for id_, sequence in self.ended.items():
            new = sequence.new
            expected = generate_alone(sequence.prompt_ids, new.max_new_tokens, self.vocab_size, new.namespace)
            generated = sequence.token_ids[len(sequence.prompt_ids) :]
            assert generated == expected, f"sequence {id_} generated {generated}, alone it is {expected}"
        if not self.live:
            for scheduler, cache in self.replicas:
                stats = scheduler.stats()
                assert (stats.num_running, stats.num_waiting) == (0, 0)
                assert cache.stats().num_used_blocks == 0

    def check_integrity(self) -> None:
        for _, cache in self.replicas:
            cache.check_integrity()
            stats = cache.stats()
            assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks == stats.num_total_blocks

    def _check_plan(self, plan: StepPlan, only: Collection[RequestId] | None) -> None:
        ids = [row.id for row in plan.scheduled]
        assert len(set(ids)) == len(ids), "a sequence has two rows"
        assert not set(ids) & set(plan.preempted), "a preempted sequence has a row"
        assert only is None or set(ids) <= set(only), "a sequence outside `only` has a row"
        assert plan.num_tokens <= self.settings.max_step_tokens, "the budget is exceeded"
        assert len(ids) <= self.settings.max_num_sequences, "too many sequences run"
        single = [row.num_tokens == 1 for row in plan.scheduled]
        assert single == sorted(single, reverse=True), "rows with one token don't come first"
        sources, targets = {copy.source for copy in plan.copies}, [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        assert not sources & set(targets), "a block is source and target of copies of one step"
        for row in plan.scheduled:
            self._check_row(row, self.live[row.id])

    def _check_row(self, row: ScheduledSequence, sequence: ExpectedSequence) -> None:
        end, num_tokens = row.start + row.num_tokens, len(sequence.token_ids)
        assert row.num_tokens > 0
        assert end <= num_tokens, f"row {row} ends past the {num_tokens} known tokens"
        assert row.is_last_chunk == (end == num_tokens)
        assert len(row.block_table) * self.settings.block_size >= end, "the block table is too short"
        if sequence.has_blocks:
            assert row.start == sequence.num_computed_tokens, f"row {row} does not begin where the last one ended"
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = row.start
        assert row.num_cached_tokens == sequence.num_cached_tokens
        assert sequence.new.may_reuse_prefix or sequence.num_cached_tokens == 0
        sequence.has_blocks = True

    def _lose_blocks(self, sequence: ExpectedSequence) -> None:
        sequence.has_blocks = False
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1

    def _copy(self, plan: StepPlan) -> None:
        size = self.settings.block_size
        for copy in plan.copies:
            for offset in range(size):
                content = self._memory.get(copy.source * size + offset, -1)
                self._memory[copy.target * size + offset] = content

    def _run_row(self, row: ScheduledSequence) -> int:
        sequence = self.live[row.id]
        end = row.start + row.num_tokens
        kv = kv_of_namespace(sequence.new.namespace)
        slots = self._slots(row, 0, end)
        for position, (token_id, slot) in enumerate(zip(sequence.token_ids, slots, strict=False)):
            kv = kv_of_token(kv, token_id)
            if position >= row.start:
                self._memory[slot] = kv
            assert self._memory.get(slot) == kv, f"token {position} of sequence {row.id} is not in slot {slot}"
        sequence.num_computed_tokens = end
        sequence.steps.append(self._plans[0].step)
        self.num_computed_tokens += row.num_tokens
        return choose_token(kv, self.vocab_size)

    def _slots(self, row: ScheduledSequence, start: int, end: int) -> Iterable[int]:
        size = self.settings.block_size
        return [row.block_table[position // size] * size + position % size for position in range(start, end)]


def describe_plan(plan: StepPlan) -> tuple[object, ...]:
    """Returns a plan's values, with block tables, to compare it with another plan."""
    rows = [
        (row.id, row.start, row.num_tokens, tuple(row.block_table), row.is_last_chunk, row.num_cached_tokens)
        for row in plan.scheduled
    ]
    return plan.step, tuple(rows), plan.copies, plan.preempted
