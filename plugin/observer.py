"""Observers of a server: called at the end of each request, at each refusal, and after each step.

Metrics, traces and the log are observers. None is needed to serve, and one that raises does not affect any request."""

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
    """How an accepted request ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    ABORTED = "aborted"
    """The client cancelled it or disconnected."""
    ABANDONED = "abandoned"
    """No step was requested for it within the timeout, so its client is considered dead."""
    FAILED = "failed"
    """A step failed."""


class Refusal(str, Enum):
    """Why requests were refused."""

    INVALID = "invalid"
    """The request is invalid."""
    UNSUPPORTED = "unsupported"
    """The request asks for something that this server can't do, as a grammar."""
    TOO_LONG = "too_long"
    """Longer than the model, the limits or the whole cache can ever hold."""
    DUPLICATE = "duplicate"
    """The id is in use."""
    UNKNOWN_BATCH = "unknown_batch"
    """The call names a running batch that does not exist."""
    NOT_READY = "not_ready"
    """Before the warm-up."""
    OVERLOADED = "overloaded"
    """More requests run and wait than are allowed at once."""
    DRAINING = "draining"
    FAILED = "failed"
    """Reading it failed: a fault of the server."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Facts about a request that has ended. Times are of `time.monotonic`."""

    request_id: RequestId
    outcome: Outcome
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found instead of computed at the first admission."""
    num_generated_tokens: int
    arrived_s: float
    admitted_s: float | None
    """When a step first ran it; None if it got no token, or the backend does not report it."""
    first_token_s: float | None
    ended_s: float
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Trace context that the client sent: W3C's "traceparent" and "tracestate"."""
    prompt: str | None = None
    """Prompt text; set only if the configuration asks for it."""
    external_id: str = ""
    """The client's own name of the request, where its protocol has one."""

    @property
    def queue_s(self) -> float | None:
        """Time from the arrival to the first step."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if there is none. A request ends with its last token."""
        if self.first_token_s is None or self.num_generated_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.num_generated_tokens - 1)

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s


class RequestObserver(Protocol):
    """Is called for requests, between steps. It must be quick: count, or pass work to another thread."""

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        """Called when a request got its first token. Its `RequestEnd` will have the same times."""

    def on_end(self, end: RequestEnd) -> None: ...

    def on_refusal(self, reason: Refusal, num_requests: int) -> None: ...


class StepObserver(Protocol):
    """Is called for steps, on the thread that runs them. It must be quick too."""

    def on_step(self, duration_s: float, stats: BackendStats) -> None:
        """Called after a step. `stats` are those after the step, without the requests that ended in it."""

    def on_change(self, stats: BackendStats) -> None:
        """Called when requests were added or ended outside of a step."""


@dataclass(frozen=True, slots=True)
class Observers:
    """All observers of one server. If an observer raises, the error is logged and ignored."""

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
