"""Tokens from the step thread to a thread that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.requests import StepOutput
from pagedkv.plugin.serving.generation import Sample

Tokens = list[tuple[Sample, StepOutput]]

MAX_UNREAD_STEPS = 1024
"""An inbox that may be full takes no more than so many."""


class ThreadInbox:
    """Hands a loop's tokens to one thread: one hand-over a step, however many samples it has.

    Args:
        may_be_full: lets its samples wait for a reader that is far behind.
    """

    def __init__(self, *, may_be_full: bool = False) -> None:
        self._may_be_full = may_be_full
        self._steps: SimpleQueue[Tokens | PagedKVError] = SimpleQueue()

    @property
    def is_full(self) -> bool:
        return self._may_be_full and self._steps.qsize() >= MAX_UNREAD_STEPS

    def deliver(self, outputs: Tokens) -> None:
        self._steps.put(outputs)

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
        return step
