"""The step thread: one thread, jobs in order, background work between them, nothing lost at the end."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

import pytest

from pagedkv.plugin.errors import UnavailableError
from pagedkv.plugin.serving.step_thread import StepThread

TIMEOUT_S = 20


@pytest.fixture
def thread():
    made = StepThread("test-step")
    yield made
    made.close()


def hold(thread: StepThread) -> threading.Event:
    """Keeps the thread in a job until the event is set."""
    begun, release = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        release.wait(TIMEOUT_S)

    thread.submit(job)
    assert begun.wait(TIMEOUT_S)
    return release


def test_jobs_run_in_order_on_one_thread_that_is_not_the_caller_s(thread: StepThread) -> None:
    seen: list[tuple[int, int]] = []
    futures = [thread.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert [index for index, _ in seen] == list(range(50))
    (ident,) = {ident for _, ident in seen}
    assert ident != threading.get_ident()


def test_a_job_s_result_and_error_are_the_caller_s(thread: StepThread) -> None:
    assert thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 / 0)
    assert thread.run(lambda: thread.run(lambda: 8)) == 8, "a job that runs another one does not wait for itself"


def test_a_job_that_was_cancelled_before_it_began_never_runs(thread: StepThread) -> None:
    release, ran = hold(thread), []
    cancelled: Future[None] = thread.submit(lambda: ran.append("cancelled"))
    kept = thread.submit(lambda: ran.append("kept"))
    assert cancelled.cancel()
    release.set()
    kept.result(TIMEOUT_S)
    assert ran == ["kept"]


def test_background_work_and_jobs_take_turns(thread: StepThread) -> None:
    order: list[str] = []
    release = hold(thread)
    thread.set_background(lambda: order.append("work") is None and order.count("work") < 3)
    thread.wake()
    jobs = [thread.submit(lambda: order.append("job")) for _ in range(3)]
    release.set()
    for job in jobs:
        job.result(TIMEOUT_S)
    thread.run(lambda: None)
    while order.count("work") < 3:
        thread.run(lambda: None)
    assert order[:5] == ["work", "job", "job", "job", "work"]
    assert order.count("work") == 3, "it is not called again once it has nothing more to do"


def test_background_work_that_raises_is_logged_and_jobs_go_on(
    thread: StepThread, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def work() -> bool:
        failed.set()
        raise RuntimeError("broken")

    thread.set_background(work)
    with caplog.at_level(logging.ERROR):
        thread.wake()
        assert failed.wait(TIMEOUT_S)
        assert thread.run(lambda: 3) == 3
    assert "background work" in caplog.text


def test_busy_time_is_that_of_the_present_job(thread: StepThread) -> None:
    release = hold(thread)
    assert thread.busy_s() > 0
    release.set()
    thread.run(lambda: None)
    assert thread.busy_s() == 0


def test_close_runs_what_was_given_and_takes_no_more(thread: StepThread) -> None:
    release, ran = hold(thread), []
    for i in range(5):
        thread.post(lambda i=i: ran.append(i))
    release.set()
    thread.close()
    thread.close()
    assert ran == list(range(5))
    with pytest.raises(UnavailableError, match="closed"):
        thread.submit(lambda: None)


def test_an_error_nobody_waits_for_is_logged(thread: StepThread, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        thread.post(lambda: 1 / 0)
        thread.run(lambda: None)
    assert "ZeroDivisionError" in caplog.text
