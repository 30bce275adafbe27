"""Continuous batching with chunked prefill and preemption by recompute, first come, first served.

There is no prefill mode and no decode mode: `num_computed_tokens` of a sequence catches up with its known tokens, so
a prompt, a chunk, a prefix hit, a decode and a recompute are one case. Batching by iteration follows Yu et al., "Orca:
A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022); chunks beside decodes under a token
budget follow Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024);
preemption by recompute follows Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, ClassVar

from pagedkv.plugin.errors import CapacityError, DuplicateRequestError, IntegrityError, RequestError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import BlockGrant, CacheManager
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.resolved_config import SchedulerSettings
from pagedkv.plugin.scheduler.admission import Admission, AdmissionPolicy, Decision
from pagedkv.plugin.scheduler.draft import StepDraft
from pagedkv.plugin.scheduler.growth import GrowthPromises
from pagedkv.plugin.scheduler.idle import find_idle, note_in_vain, note_named
from pagedkv.plugin.scheduler.recompute import RecomputeMeter
from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress
from pagedkv.plugin.scheduler.short_prompts import count_kept_tokens
from pagedkv.plugin.stats import SchedulerStats
from pagedkv.plugin.step_plan import NewSequence, StepPlan

if TYPE_CHECKING:
    from typing_extensions import Self


class ContinuousScheduler:
    """The scheduler `continuous`.

    A step takes the running sequences with one token left, then the running ones in the middle of their prompt, then
    waiting ones, each group oldest first; a long prompt leaves room for short ones behind it. If the cache is full, a
    running sequence preempts the newest one; if none is newer than itself, it waits for this step. So the oldest
    sequence always makes progress, and every sequence ends, however small the cache is.
    """

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, config: SchedulerSettings, cache: CacheManager, num_cache_tokens: int) -> None:
        self._cache = cache
        self._num_cache_tokens = num_cache_tokens
        self._max_step_tokens = config.max_step_tokens
        self._short_prompt_share = config.short_prompt_share
        # Every running sequence may have one token left at the same time: all of them must fit into one step.
        self._max_num_running = min(config.max_num_sequences, config.max_step_tokens)
        self._live: dict[RequestId, SequenceProgress] = {}
        self._running: list[SequenceProgress] = []
        """In order of arrival, like `_waiting`."""
        self._waiting: list[SequenceProgress] = []
        self._open_plan: StepPlan | None = None
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._recompute_meter = RecomputeMeter(num_cache_tokens)
        self._promises = GrowthPromises(config.block_size)
        self._admission = AdmissionPolicy(cache, config.block_size, self._recompute_meter, self._promises)

    @classmethod
    def create(cls, config: SchedulerSettings, cache: CacheManager, num_cache_tokens: int) -> Self:
        return cls(config, cache, num_cache_tokens)

    def add(self, sequence: NewSequence) -> None:
        """Queues a sequence.

        Raises:
            CapacityError: an empty cache could not hold the sequence to its end.
            DuplicateRequestError: the id is in use.
            RequestError: the prompt is empty.
        """
        max_cache_tokens = self._measure(sequence)
        parent = self._live.get(sequence.parent_id) if sequence.parent_id is not None else None
        state = SequenceProgress.create(sequence, self._num_arrivals, max_cache_tokens, parent)
        self._cache.open(state.id, state.token_ids, state.namespace, may_reuse_prefix=state.may_reuse_prefix)
        self._num_arrivals += 1
        self._live[state.id] = state
        if state.parent is not None:
            state.parent.num_children += 1
        self._waiting.append(state)

    def schedule(self, only: Collection[RequestId] | None = None, max_chunk_tokens: int | None = None) -> StepPlan:
        """Decides the next step and takes the blocks for it.

        Args:
            only: ids of sequences; others neither run nor are admitted. Others can be preempted: by an older sequence,
                as always, and by any once they are idle, see `pagedkv.plugin.scheduler.idle`. Until then a sequence
                waits if older ones outside `only` hold all blocks.
            max_chunk_tokens: limits the tokens of all sequences with more than one token left.

        Returns:
            The plan; empty if no sequence can run. A plan with rows must be committed or failed before the next call.

        Raises:
            IntegrityError: the last plan was neither committed nor failed.
        """
        self._refuse_open_plan("schedule")
        eligible = None if only is None else frozenset(only)
        draft = StepDraft(self._max_step_tokens)
        self._extend_running(draft, eligible, max_chunk_tokens)
        # While running sequences lack blocks, no new sequence is admitted.
        if not draft.is_cache_full:
            self._promises.clear()
            self._admit_waiting(draft, eligible)
        self._use_tokens_left(draft)
        plan = draft.build(self._num_steps, self._cache)
        self._num_steps += 1
        self._open_plan = plan if plan.scheduled else None
        return plan

    def commit(self, plan: StepPlan, finished: Collection[RequestId]) -> None:
        """Records that a plan ran.

        Args:
            finished: sequences of the plan that end with it; their last token need not be appended.

        Raises:
            IntegrityError: this is not the open plan, or a row that samples has no new token; nothing has changed.
        """
        ended = frozenset(finished)
        self._refuse_other_plan(plan)
        self._refuse_wrong_result(plan, ended)
        self._open_plan = None
        num_recomputed_tokens = 0
        for row in plan.scheduled:
            sequence = self._live[row.id]
            num_recomputed_tokens += sequence.advance(row.num_tokens)
            self._cache.commit(sequence.id, sequence.num_computed_tokens)
            if row.id in ended:
                self._remove(sequence)
        self._recompute_meter.count(plan.num_tokens, num_recomputed_tokens)

    def fail(self, plan: StepPlan) -> None:
        """Releases the sequences of a plan that failed. Raises IntegrityError, like `commit`."""
        self._refuse_other_plan(plan)
        self._open_plan = None
        for row in plan.scheduled:
            self._remove(self._live[row.id])

    def abort(self, ids: Collection[RequestId]) -> None:
        """Releases sequences in any state; ignores unknown ids. Raises IntegrityError while a plan is open."""
        self._refuse_open_plan("abort")
        aborted = [self._live[id_] for id_ in frozenset(ids) if id_ in self._live]
        # The order of release becomes the order of eviction, so it must not be the order of a set.
        for sequence in sorted(aborted, key=_by_arrival):
            self._remove(sequence)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            preemptions=self._num_preemptions,
            recomputed_tokens=self._recompute_meter.num_recomputed_tokens,
        )

    def _measure(self, new: NewSequence) -> int:
        if new.id in self._live:
            raise DuplicateRequestError(f"request {new.id} is running already; ids are free again after the end")
        if not new.token_ids:
            raise RequestError(f"request {new.id}: the prompt has no tokens; send at least one")
        # The last generated token is never input of the model, so its KV is never needed.
        max_cache_tokens = len(new.token_ids) + new.max_new_tokens - 1
        if max_cache_tokens > self._num_cache_tokens:
            raise CapacityError(
                f"request {new.id}: {len(new.token_ids)} prompt tokens and max_new_tokens {new.max_new_tokens} need "
                f"room for {max_cache_tokens} tokens, the whole cache holds {self._num_cache_tokens}; shorten the "
                "prompt, lower max_new_tokens, or give the cache more memory"
            )
        return max_cache_tokens

    def _extend_running(
        self, draft: StepDraft, eligible: frozenset[RequestId] | None, max_chunk_tokens: int | None
    ) -> None:
        decodes: list[SequenceProgress] = []
        chunks: list[SequenceProgress] = []
        for sequence in self._running:
            if eligible is None or sequence.id in eligible:
                (decodes if sequence.num_tokens_left == 1 else chunks).append(sequence)
        note_named((*decodes, *chunks), self._num_steps)
        for sequence in decodes:
            # An older sequence may have preempted it meanwhile.
            if sequence.is_running and draft.num_tokens_left:
                self._extend(sequence, 1, draft)
        if max_chunk_tokens is not None:
            draft.num_tokens_left = min(draft.num_tokens_left, max_chunk_tokens)
        for index, sequence in enumerate(chunks):
            if sequence.is_running and draft.num_tokens_left:
                behind = chain(chunks[index + 1 :], self._list_waiting(eligible))
                self._extend(sequence, self._choose_num_tokens(sequence, 0, behind, draft), draft)

    def _choose_num_tokens(
        self, sequence: SequenceProgress, num_cached_tokens: int, behind: Iterable[SequenceProgress], draft: StepDraft
    ) -> int:
        """Tokens of a sequence in the step: all that are left, less what is kept for short ones behind it."""
        wanted = sequence.num_tokens_left - num_cached_tokens
        if wanted <= draft.num_tokens_left * (1 - self._short_prompt_share):
            return wanted
        num_kept = count_kept_tokens(draft.num_tokens_left, self._short_prompt_share, behind)
        return min(wanted, draft.num_tokens_left - num_kept)

    def _use_tokens_left(self, draft: StepDraft) -> None:
        """Gives what was kept for others, and not used, to those for whom it was cut."""
        for sequence in draft.chunks if draft.num_tokens_left else ():
            start = sequence.num_acquired_tokens
            num_tokens = min(sequence.num_tokens - start, draft.num_tokens_left)
            if num_tokens and self._cache.acquire(sequence.id, start + num_tokens) is not None:
                sequence.num_acquired_tokens = start + num_tokens
                draft.extend(sequence, num_tokens)

    def _list_waiting(self, eligible: frozenset[RequestId] | None, first: int = 0) -> Iterator[SequenceProgress]:
        waiting = islice(self._waiting, first, None)
        return waiting if eligible is None else (one for one in waiting if one.id in eligible)

    def _extend(self, sequence: SequenceProgress, num_tokens: int, draft: StepDraft) -> None:
        grant = self._acquire(sequence, sequence.num_computed_tokens + num_tokens, draft)
        if grant is not None:
            draft.add(sequence, num_tokens, grant.copies)

    def _acquire(self, sequence: SequenceProgress, num_tokens: int, draft: StepDraft) -> BlockGrant | None:
        """Acquires blocks up to `num_tokens`; preempts idle sequences, then newer ones, if needed. None if older ones
        hold all blocks."""
        while (grant := self._cache.acquire(sequence.id, num_tokens)) is None:
            draft.is_cache_full = True
            idle = find_idle(self._running)
            if idle is not None:
                self._preempt(idle, draft)
            elif self._running[-1] is not sequence:
                self._preempt(self._running[-1], draft)
            elif not self._is_held_by_idle(sequence):
                return None
        sequence.num_acquired_tokens = num_tokens
        sequence.num_steps_in_vain = 0
        return grant

    def _is_held_by_idle(self, sequence: SequenceProgress) -> bool:
        """Whether idle sequences run, once a sequence has found no room; its step counts as in vain if none does."""
        if find_idle(self._running) is None:
            note_in_vain(sequence, self._running, self._num_steps)
        return find_idle(self._running) is not None

    def _preempt(self, sequence: SequenceProgress, draft: StepDraft) -> None:
        draft.drop(sequence)
        self._cache.release(sequence.id)
        self._running.remove(sequence)
        sequence.lose_blocks()
        self._num_preemptions += 1
        insort(self._waiting, sequence, key=_by_arrival)
        self._cache.open(
            sequence.id,
            sequence.token_ids,
            sequence.namespace,
            may_reuse_prefix=sequence.may_reuse_prefix,
            is_readmission=True,
        )

    def _admit_waiting(self, draft: StepDraft, eligible: frozenset[RequestId] | None) -> None:
        position = 0
        while position < len(self._waiting) and draft.num_tokens_left:
            sequence = self._waiting[position]
            if eligible is not None and sequence.id not in eligible:
                position += 1
                continue
            admission = self._consider(sequence, draft)
            if admission.decision is Decision.NO_ROOM:
                if not self._is_held_by_idle(sequence):
                    return
                self._preempt_idle(draft)
                # An older one now waits before it.
                position = self._waiting.index(sequence)
            elif admission.decision is Decision.DEFER:
                position += 1
            else:
                behind = self._list_waiting(eligible, position + 1)
                num_tokens = self._choose_num_tokens(sequence, admission.num_cached_tokens, behind, draft)
                if not num_tokens:
                    position += 1
                    continue
                del self._waiting[position]
                self._admit(sequence, admission, num_tokens, draft)

    def _consider(self, sequence: SequenceProgress, draft: StepDraft) -> Admission:
        if len(self._running) >= self._max_num_running:
            return Admission(Decision.NO_ROOM)
        return self._admission.consider(sequence, self._running, draft)

    def _preempt_idle(self, draft: StepDraft) -> None:
        idle = find_idle(self._running)
        assert idle is not None
        self._preempt(idle, draft)
        self._promises.clear()

    def _admit(self, sequence: SequenceProgress, admission: Admission, num_tokens: int, draft: StepDraft) -> None:
        start = admission.num_cached_tokens
        if admission.fork_from is not None:
            start = self._cache.fork(admission.fork_from.id, sequence.id, start)
        grant = self._cache.acquire(sequence.id, start + num_tokens)
        assert grant is not None, "the cache's plan promised room"
        assert admission.fork_from is not None or grant.num_cached_tokens == start, "plan and grant differ"
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = start
        sequence.num_computed_tokens = start
        sequence.num_acquired_tokens = start + num_tokens
        sequence.is_running = True
        sequence.num_steps_in_vain = 0
        note_named([sequence], self._num_steps)
        insort(self._running, sequence, key=_by_arrival)
        self._promises.add(sequence)
        draft.add(sequence, num_tokens, grant.copies)

    def _remove(self, sequence: SequenceProgress) -> None:
        self._cache.release(sequence.id)
        (self._running if sequence.is_running else self._waiting).remove(sequence)
        del self._live[sequence.id]
        if sequence.parent is not None:
            sequence.parent.num_children -= 1
        if sequence.num_children:
            self._orphan_children(sequence)

    def _orphan_children(self, parent: SequenceProgress) -> None:
        for sequence in self._live.values():
            if sequence.parent is parent:
                sequence.parent = None

    def _refuse_open_plan(self, call: str) -> None:
        if self._open_plan is not None:
            raise IntegrityError(f"{call}: step {self._open_plan.step} was neither committed nor failed; do that first")

    def _refuse_other_plan(self, plan: StepPlan) -> None:
        if plan.scheduled and plan is not self._open_plan:
            raise IntegrityError(f"step {plan.step} is not open: a plan is committed or failed once, before the next")

    def _refuse_wrong_result(self, plan: StepPlan, finished: frozenset[RequestId]) -> None:
        num_finished = 0
        for row in plan.scheduled:
            if row.id in finished:
                num_finished += 1
            elif row.is_last_chunk and len(self._live[row.id].token_ids) != row.start + row.num_tokens + 1:
                raise IntegrityError(
                    f"step {plan.step}: sequence {row.id} samples, but not one token was appended to its "
                    f"{row.start + row.num_tokens}"
                )
        if num_finished < len(finished):
            raise IntegrityError(f"step {plan.step}: {sorted(finished)} finished, but not all of them are in the plan")


def _by_arrival(sequence: SequenceProgress) -> int:
    return sequence.arrival
