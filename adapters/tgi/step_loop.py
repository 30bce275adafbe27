"""Runs all calls of a backend on its step thread, so that no step blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pagedkv.plugin.serving.step_thread import StepThread

T = TypeVar("T")


class StepLoop:
    """Runs jobs on one thread, one after the other, in the order in which they were submitted.

    Args:
        thread: of the backend, which outlives the loop; None makes one that ends with it.
    """

    def __init__(self, thread: StepThread | None = None) -> None:
        self._thread = thread or StepThread()
        self._owns_thread = thread is None

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job; returns its result or raises its error.

        If the caller is cancelled, a job that has not started is removed from the queue; one that has started runs to
        its end.
        """
        return await asyncio.wrap_future(self.submit(job))

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; the future has its result or error."""
        return self._thread.submit(job)

    def post(self, job: Callable[[], object]) -> None:
        """Queues a job without waiting for it. Its error is logged."""
        self._thread.post(job)

    def busy_s(self) -> float:
        """How long the current job has been running, in seconds; 0 between jobs. May be called from any thread."""
        return self._thread.busy_s()

    def close(self) -> None:
        """Waits for all queued jobs. Where the thread is the loop's own, `run` and `post` raise RuntimeError then."""
        if self._owns_thread:
            self._thread.close()
        else:
            self._thread.run(lambda: None)
