"""The continuous scheduler's state of one sequence; `pagedkv.plugin.step_plan` says what others keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.step_plan import NewSequence, count_common_tokens


@dataclass(slots=True, eq=False)
class SequenceProgress:
    """One live sequence, waiting or running. `num_computed_tokens` catches up with its known tokens."""

    id: RequestId
    arrival: int
    """Number of the sequence in this scheduler: a smaller one is older."""
    token_ids: Sequence[int]
    """Known tokens: the prompt, then the generated ones. The caller's list, which grows; never changed here."""
    num_prompt_tokens: int
    max_cache_tokens: int
    """Tokens whose KV the sequence holds at its end."""
    namespace: CacheNamespace
    may_reuse_prefix: bool
    parent: SequenceProgress | None
    """The sequence to fork from, while it shares a beginning and is live. An id may be another sequence's by now."""
    num_shareable_tokens: int
    """Tokens whose KV can be forked from the parent once the parent has computed them."""
    num_children: int = 0
    """Live sequences that name this one as their parent."""
    is_running: bool = False
    num_computed_tokens: int = 0
    num_acquired_tokens: int = 0
    """Number of tokens for which blocks were acquired."""
    num_cached_tokens: int | None = None
    """Tokens found or forked at the first admission; None before it."""
    max_computed_tokens: int = 0
    """Maximum of `num_computed_tokens` so far. Computing a token below it is a recompute."""
    num_preemptions: int = 0
    last_named_step: int = 0
    """The last step in which it might run; see `pagedkv.plugin.scheduler.idle`."""
    is_idle: bool = False
    num_steps_in_vain: int = 0
    in_vain_since_step: int = 0

    @classmethod
    def create(
        cls, new: NewSequence, arrival: int, max_cache_tokens: int, parent: SequenceProgress | None
    ) -> SequenceProgress:
        """`parent` is the live sequence that `new` names, if any."""
        token_ids = new.token_ids
        num_shareable_tokens = 0
        # Nothing is shared if every prompt token must be computed, or between namespaces.
        if parent is not None and new.may_reuse_prefix and parent.namespace == new.namespace:
            num_shareable_tokens = count_common_tokens(parent.token_ids, token_ids, len(token_ids) - 1)
        return cls(
            id=new.id,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_cache_tokens=max_cache_tokens,
            namespace=new.namespace,
            may_reuse_prefix=new.may_reuse_prefix,
            parent=parent if num_shareable_tokens else None,
            num_shareable_tokens=num_shareable_tokens,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def num_tokens_after(self, num_more_tokens: int) -> int:
        """Tokens in the cache after all known and `num_more_tokens` generated ones, or at the sequence's end."""
        return min(len(self.token_ids) + num_more_tokens, self.max_cache_tokens)

    def advance(self, num_tokens: int) -> int:
        """Counts the next tokens as computed. Returns how many of them were computed before."""
        start = self.num_computed_tokens
        self.num_computed_tokens = end = start + num_tokens
        if end > self.max_computed_tokens:
            num_before = max(self.max_computed_tokens - start, 0)
            self.max_computed_tokens = end
            return num_before
        return num_tokens

    def lose_blocks(self) -> None:
        """Resets the computed tokens to 0, for a preemption."""
        self.is_running = False
        self.num_computed_tokens = 0
        self.num_acquired_tokens = 0
        self.num_preemptions += 1
        # If a token was generated, the whole prompt was computed once: may_reuse_prefix=False is satisfied.
        self.may_reuse_prefix = self.may_reuse_prefix or len(self.token_ids) > self.num_prompt_tokens
