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
        self._is_running_job = False

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job; returns its result or raises its error.

        If the caller is cancelled, a job that has not started is removed from the queue; one that has started runs to
        its end.
        """
        return await asyncio.wrap_future(self.submit(job))

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; the future has its result or error."""
        return self._thread.submit(lambda: self._run_marked(job))

    def post(self, job: Callable[[], object]) -> None:
        """Queues a job without waiting for it. Its error is logged."""
        self._thread.post(lambda: self._run_marked(job))

    @property
    def is_running_job(self) -> bool:
        """Whether a job of this loop runs, and not one of another door's on the same thread. From any thread."""
        return self._is_running_job

    def busy_s(self) -> float:
        """How long the thread has been at what it does now, of whichever door; 0 between jobs. From any thread."""
        return self._thread.busy_s()

    def close(self) -> None:
        """Waits for all queued jobs. Where the thread is the loop's own, `run` and `post` raise RuntimeError then."""
        if self._owns_thread:
            self._thread.close()
        else:
            self._thread.run(lambda: None)

    def _run_marked(self, job: Callable[[], T]) -> T:
        self._is_running_job = True
        try:
            return job()
        finally:
            self._is_running_job = False
