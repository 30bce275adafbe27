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
    num_cached_tokens: int | None = None
    """None until the sequence is first admitted."""
    prefill_logprobs: list[float] = field(default_factory=list)
    """One a prompt token computed so far; only where the request asks for it."""

    @classmethod
    def create(cls, request: Request, arrival: int) -> LiveSequence:
        return cls(request, arrival, SamplingRow.create(request.params, list(request.prompt_ids)))

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.sampling.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.sampling.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prefill_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt have still to be collected."""
        return self.request.params.prefill_logprobs and self.num_generated_tokens == 0

    def extend_prefill_logprobs(self, start: int, logprobs: list[float]) -> None:
        """Keeps the log-probabilities that a chunk beginning at `start` gives to the tokens after its own.

        A chunk at 0 begins anew: the sequence was preempted before its prompt was whole.
        """
        if start == 0:
            self.prefill_logprobs = [math.nan]
        self.prefill_logprobs.extend(logprobs)
