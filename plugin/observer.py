"""What a server tells those who watch it: the end of each request, each refusal, each step. Metrics, traces and the
log are such watchers; none is needed to serve, and one that fails costs no request anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.stats import BackendStats

logger = logging.getLogger(__name__)


class Outcome(str, Enum):
    """How a request that was taken ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    ABORTED = "aborted"
    """The client ended it, or went away."""
    ABANDONED = "abandoned"
    """No step was asked for it for so long that its client is taken for dead."""
    FAILED = "failed"
    """A step failed."""


class Refusal(str, Enum):
    """Why requests were not taken."""

    INVALID = "invalid"
    """Wrong in itself, or asking for what is not supported."""
    TOO_LONG = "too_long"
    """Longer than the model, the limits or the whole cache can ever hold."""
    DUPLICATE = "duplicate"
    """Of an id that is in use."""
    UNKNOWN_BATCH = "unknown_batch"
    """Sent along with a running batch that is not here."""
    NOT_READY = "not_ready"
    """Before the warm-up."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """What there is to tell of a request once it has ended. Times are of time.monotonic."""

    request_id: RequestId
    outcome: Outcome
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found instead of computed at the first admission."""
    num_generated_tokens: int
    arrived_s: float
    admitted_s: float | None
    """When a step first ran it; None where it got no token, or the backend does not tell."""
    first_token_s: float | None
    ended_s: float
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Where the request's trace goes on from: W3C's "traceparent" and "tracestate", as the client sent them."""
    prompt: str | None = None
    """Only where the configuration asks for it."""

    @property
    def queue_s(self) -> float | None:
        """From the arrival to the first step."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is none. A request's end is that of its last token."""
        if self.first_token_s is None or self.num_generated_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.num_generated_tokens - 1)

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s


class RequestObserver(Protocol):
    """Hears of requests. Called between steps, so that it must be quick: it counts, or hands over to a thread."""

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        """A request got its first token; the times are those that its `RequestEnd` will have."""

    def on_end(self, end: RequestEnd) -> None: ...

    def on_refusal(self, reason: Refusal, num_requests: int) -> None: ...


class StepObserver(Protocol):
    """Hears of steps, on the thread that runs them, and must be quick as well."""

    def on_step(self, duration_s: float, stats: BackendStats) -> None:
        """A step has run; `stats` are of after it, when those who ended in it are gone."""

    def on_change(self, stats: BackendStats) -> None:
        """Requests came or went otherwise."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Whoever watches one server. A watcher that raises is logged and passed over."""

    requests: tuple[RequestObserver, ...] = ()
    steps: tuple[StepObserver, ...] = ()

    def report_first_token(self, arrived_s: float, admitted_s: float | None, first_token_s: float) -> None:
        queue_s = None if admitted_s is None else admitted_s - arrived_s
        for observer in self.requests:
            with _logged(observer):
                observer.on_first_token(queue_s, first_token_s - arrived_s)

    def report_end(self, end: RequestEnd) -> None:
        for observer in self.requests:
            with _logged(observer):
                observer.on_end(end)

    def report_refusal(self, reason: Refusal, num_requests: int) -> None:
        for observer in self.requests:
            with _logged(observer):
                observer.on_refusal(reason, num_requests)

    def report_step(self, duration_s: float, stats: BackendStats) -> None:
        for observer in self.steps:
            with _logged(observer):
                observer.on_step(duration_s, stats)

    def report_change(self, stats: BackendStats) -> None:
        for observer in self.steps:
            with _logged(observer):
                observer.on_change(stats)


@contextmanager
def _logged(observer: object) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s failed", type(observer).__name__)
