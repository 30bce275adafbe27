"""The paged backend's state of a live request: its tokens, its sampling row, and what was reported.

`pagedkv.plugin.step_plan` says what scheduler and cache manager keep of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagedkv.plugin.requests import Request, RequestId
from pagedkv.plugin.sampling.sampler import SamplingRow


@dataclass(slots=True)
class LiveSequence:
    request: Request
    arrival: int
    """Number of the request in this backend. Outputs are in this order."""
    sampling: SamplingRow
    token_ids: list[int]
    """Prompt and generated tokens. Only the backend appends; sampler, scheduler and cache manager keep this list."""
    num_prompt_tokens: int
    seed: int | None
    """The seed that outputs report; None for greedy requests."""
    wants_prefill_logprobs: bool
    """Whether log-probabilities of the prompt are still to be collected. False after the first output."""
    num_cached_tokens: int | None = None
    """None until the sequence is first admitted."""
    admitted_s: float | None = None
    """Time of the first admission, of `time.monotonic`."""
    prefill_logprobs: list[float] = field(default_factory=lambda: [math.nan])
    """One for each prompt token computed so far, the first NaN; used only where the request asks for them."""

    @classmethod
    def create(cls, request: Request, arrival: int, fresh_seed: int | None = None) -> LiveSequence:
        """Makes the state of a new request. `fresh_seed` is its seed if it has none; None draws a random one."""
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
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def extend_prefill_logprobs(self, start: int, logprobs: list[float]) -> None:
        """Adds the log-probabilities of prompt tokens from a chunk that begins at `start`.

        A chunk at 0 starts again: the sequence was preempted before its whole prompt was computed.
        """
        if start == 0:
            self.prefill_logprobs = [math.nan]
        self.prefill_logprobs.extend(logprobs)

    def take_prefill_logprobs(self) -> tuple[float, ...] | None:
        """Returns the log-probabilities for the first output of a request that asks for them; None otherwise."""
        if not self.wants_prefill_logprobs:
            return None
        self.wants_prefill_logprobs = False
        return tuple(self.prefill_logprobs)
