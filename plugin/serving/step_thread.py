"""The one thread on which everything of a backend runs: jobs in the order they were given, and steps between them.

One thread and not any thread: parallel regions of the math libraries keep a team of threads for each thread that enters
them, so that a backend that is loaded on one thread and stepped on another has more threads than the machine has cores.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pagedkv.plugin.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepThread:
    """Runs jobs one after the other, and a background work between them while it has something to do.

    A job never waits for more than one call of the background work, and the background work only for the jobs that were
    there when its last call ended: each has its turn, and requests that came during one step are all in the next.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "pagedkv-step") -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._background: Callable[[], bool] | None = None
        self._has_background_work = False
        self._is_closed = False
        self._started_s: float | None = None
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job. A future that is cancelled before its job has begun takes it out of the queue.

        Raises:
            UnavailableError: after `close`, or in another process than the one that made this.
        """
        self._refuse_forked()
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise UnavailableError("the engine is closed")
            self._jobs.append((future, job))
            self._changed.notify()
        return future

    def run(self, job: Callable[[], T]) -> T:
        """Runs a job and waits for it; at once where this is the thread itself. Returns or raises as the job does."""
        if threading.current_thread() is self._thread:
            return job()
        return self.submit(job).result()

    def post(self, job: Callable[[], object]) -> None:
        """Queues a job that nobody waits for; its error is logged."""
        self.submit(job).add_done_callback(_log_failure)

    def set_background(self, work: Callable[[], bool] | None) -> None:
        """Sets what runs between jobs, from the next `wake` on. It returns whether it wants to be called again."""
        with self._changed:
            self._background = work
            self._has_background_work = False

    def wake(self) -> None:
        """Tells that the background work has something to do."""
        with self._changed:
            self._has_background_work = self._background is not None
            self._changed.notify()

    def wait_for_job(self, timeout_s: float) -> None:
        """Lets the background work pause until a job is there or the time is over. On this thread alone."""
        with self._changed:
            if not self._jobs and not self._is_closed:
                self._changed.wait(timeout_s)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that made the thread."""
        return os.getpid() != self._process_id

    def busy_s(self) -> float:
        """Seconds that the present job or step has been running; 0 between them. May be called from any thread."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def close(self) -> None:
        """Waits for the jobs that were given; afterwards `submit` raises UnavailableError. May be called again."""
        if self.is_forked:
            return
        self.close_later()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_later(self) -> None:
        """The same without waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _refuse_forked(self) -> None:
        """A fork has no threads, and may have copied a lock that is held: to wait here would be for ever."""
        if self.is_forked:
            raise UnavailableError(
                f"this engine was made in process {self._process_id}, and a fork of it has none of its threads: make "
                "an engine in each process, or start processes with the method spawn"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._has_background_work and not self._is_closed:
                    self._changed.wait()
                if self._is_closed and not self._jobs:
                    return
                num_jobs = len(self._jobs)
            for _ in range(num_jobs):
                # This thread alone takes jobs away.
                self._run_job(*self._jobs.popleft())
            if self._has_background_work:
                self._run_background()

    def _run_job(self, future: Future[Any], job: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._started_s = time.monotonic()
        try:
            result = job()
        except BaseException as error:
            self._started_s = None
            future.set_exception(error)
        else:
            self._started_s = None
            future.set_result(result)

    def _run_background(self) -> None:
        work = self._background
        self._has_background_work = False
        if work is None:
            return
        self._started_s = time.monotonic()
        try:
            wants_more = work()
        except Exception:
            logger.exception("the background work of the step thread failed")
            wants_more = False
        finally:
            self._started_s = None
        if wants_more:
            self._has_background_work = True


def _log_failure(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a job of the step thread failed", exc_info=error)
