"""A live request as the paged backend keeps it: its tokens, how it samples, what was reported of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagedkv.plugin.requests import Request
from pagedkv.plugin.sampling.sampler import SamplingRow


@dataclass(slots=True)
class LiveSequence:
    request: Request
    arrival: int
    """Counts the requests of this backend; outputs come in this order."""
    sampling: SamplingRow
    token_ids: list[int]
    """Prompt and generated tokens: the sampling row's own list."""
    num_prompt_tokens: int
    seed: int | None
    """What outputs report: None for greedy requests."""
    wants_prefill_logprobs: bool
    """Whether log-probabilities of the prompt have still to be collected; no longer after the first output."""
    num_cached_tokens: int | None = None
    """None until the sequence is first admitted."""
    admitted_s: float | None = None
    """When that was, of time.monotonic."""
    prefill_logprobs: list[float] = field(default_factory=list)
    """One a prompt token computed so far; only where the request asks for it."""

    @classmethod
    def create(cls, request: Request, arrival: int, fresh_seed: int | None = None) -> LiveSequence:
        """`fresh_seed` is for a request that brings none; None draws one."""
        params = request.params
        sampling = SamplingRow.create(params, list(request.prompt_ids), fresh_seed)
        return cls(
            request,
            arrival,
            sampling,
            sampling.token_ids,
            sampling.num_prompt_tokens,
            sampling.seed if params.is_sampled else None,
            params.prefill_logprobs,
        )

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def extend_prefill_logprobs(self, start: int, logprobs: list[float]) -> None:
        """Keeps the log-probabilities that a chunk beginning at `start` gives to the tokens after its own.

        A chunk at 0 begins anew: the sequence was preempted before its prompt was whole.
        """
        if start == 0:
            self.prefill_logprobs = [math.nan]
        self.prefill_logprobs.extend(logprobs)

    def take_prefill_logprobs(self) -> tuple[float, ...] | None:
        """For the first output of a request that wants them; None for any other."""
        if not self.wants_prefill_logprobs:
            return None
        self.wants_prefill_logprobs = False
        return tuple(self.prefill_logprobs)
