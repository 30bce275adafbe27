"""A call for tokens and its samples, as the serving loop keeps them while they run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.observer import Outcome, RequestEnd
from pagedkv.plugin.requests import CacheNamespace, FinishReason, Request, SamplingParams, StepOutput


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue `params.n` times, as a door hands it to the loop."""

    prompt_ids: Sequence[int]
    """Token ids; read only."""
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    external_id: str = ""
    """The client's own id, for the log."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """See `RequestEnd.trace_context`."""
    prompt: str | None = None
    """Its text, where the log is to have it."""
    arrived_s: float = field(default_factory=time.monotonic)
    """Of time.monotonic."""


@dataclass(slots=True, eq=False)
class Sample:
    """One continuation of a prompt. Changed by the loop's thread alone, but for `consumer`."""

    generation: GenerationRequest
    index: int
    """0 ≤ index < params.n."""
    request: Request
    inbox: Inbox
    consumer: object = None
    """Whatever the inbox wants to find here; the loop does not read it."""
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    def describe_end(self, outcome: Outcome) -> RequestEnd:
        """What observers are told when the sample ends now."""
        return RequestEnd(
            request_id=self.request.id,
            outcome=outcome,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            arrived_s=self.generation.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            ended_s=time.monotonic(),
            trace_context=self.generation.trace_context,
            prompt=self.generation.prompt,
            external_id=self.generation.external_id,
        )


class Inbox(Protocol):
    """Where a door takes its tokens. Called on the step thread, so that it must hand over and return."""

    @property
    def is_full(self) -> bool:
        """Whether its reader is so far behind that no step shall bring it more. Asked before each step."""

    def deliver(self, outputs: list[tuple[Sample, StepOutput]]) -> None:
        """The new tokens of one step, each with its sample. The last one of a sample has a `finish_reason`."""

    def fail(self, samples: Sequence[Sample], error: PagedKVError) -> None:
        """These samples have ended without a last token, for this reason."""


FINISH_OUTCOMES = {
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.EOS_TOKEN: Outcome.EOS_TOKEN,
    FinishReason.STOP_TOKEN: Outcome.STOP_SEQUENCE,
    FinishReason.STOP_SEQUENCE: Outcome.STOP_SEQUENCE,
}
