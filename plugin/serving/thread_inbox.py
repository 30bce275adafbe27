"""Tokens from the step thread to a thread that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.requests import StepOutput
from pagedkv.plugin.serving.generation import Sample

Tokens = list[tuple[Sample, StepOutput]]

MAX_UNREAD_STEPS = 1024
"""A sample whose reader is so many steps behind is paused, until it has read half of them."""


class ThreadInbox:
    """Hands a loop's tokens to one thread: one hand-over a step, however many samples it has.

    Args:
        may_pause: pauses the samples of a reader that is far behind. For an inbox with one sample.
    """

    def __init__(self, *, may_pause: bool = False) -> None:
        self._may_pause = may_pause
        self._steps: SimpleQueue[Tokens | PagedKVError] = SimpleQueue()

    def deliver(self, outputs: Tokens) -> None:
        self._steps.put(outputs)
        if self._may_pause and self._steps.qsize() >= MAX_UNREAD_STEPS:
            for sample, _ in outputs:
                sample.is_paused = True

    def fail(self, samples: Sequence[Sample], error: PagedKVError) -> None:
        self._steps.put(error)

    def read(self, timeout_s: float | None = None) -> Tokens:
        """The tokens of the next step; waits for them. Empty if none have come in time.

        Raises:
            StepError, UnavailableError: samples have ended without a last token.
        """
        try:
            step = self._steps.get(timeout=timeout_s)
        except Empty:
            return []
        if isinstance(step, PagedKVError):
            raise step
        if self._may_pause and self._steps.qsize() < MAX_UNREAD_STEPS // 2:
            for sample, _ in step:
                sample.is_paused = False
        return step
