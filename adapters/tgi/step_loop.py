"""Runs all calls of a backend on one thread, so that no step blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepLoop:
    """Runs jobs on one thread, one after the other, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedkv-step")
        self._job_started_s: float | None = None

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job; returns its result or raises its error.

        If the caller is cancelled, a job that has not started is removed from the queue; one that has started runs to
        its end.
        """
        return await asyncio.wrap_future(self.submit(job))

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; the future has its result or error."""
        return self._executor.submit(self._timed, job)

    def post(self, job: Callable[[], object]) -> None:
        """Queues a job without waiting for it. Its error is logged."""
        self.submit(job).add_done_callback(
            lambda future: None if (error := future.exception()) is None else _log_failure(error)
        )

    def busy_s(self) -> float:
        """How long the current job has been running, in seconds; 0 between jobs. May be called from any thread."""
        started_s = self._job_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def close(self) -> None:
        """Waits for all queued jobs. Afterwards `run` and `post` raise RuntimeError."""
        self._executor.shutdown(wait=True)

    def _timed(self, job: Callable[[], T]) -> T:
        self._job_started_s = time.monotonic()
        try:
            return job()
        finally:
            self._job_started_s = None


def _log_failure(error: BaseException) -> None:
    logger.error("a job of the step loop failed", exc_info=error)
