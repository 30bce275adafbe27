"""A call-driven door on a thread that another door keeps busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedkv.adapters.tgi.step_loop import StepLoop
from pagedkv.plugin.serving.step_thread import StepThread

TIMEOUT_S = 20


@pytest.fixture
def busy_thread() -> Iterator[StepThread]:
    """Another door's step follows another, with hardly a pause between them."""
    thread, is_over = StepThread(), threading.Event()
    thread.set_background(lambda: not is_over.wait(0.01))
    thread.wake()
    yield thread
    is_over.set()
    thread.close()


def test_another_door_s_step_is_no_job_of_ours(busy_thread: StepThread) -> None:
    loop = StepLoop(busy_thread)
    assert loop.submit(lambda: loop.is_running_job).result(TIMEOUT_S)
    for _ in range(20):
        assert not loop.is_running_job
        busy_thread.run(lambda: None)
    loop.close()
    assert busy_thread.run(lambda: 3) == 3, "the thread outlives the loop"


def test_abandoned_batches_end_beside_another_door_s_steps(
    serving: Callable[..., Any], backend: Any, make_tokenizer: Any, tmp_path: Path, busy_thread: StepThread
) -> None:
    options = {"thread": busy_thread, "abandoned_batch_timeout_s": 0.05}
    with serving(backend, make_tokenizer(), tmp_path, **options) as served:
        served.wire.prefill(1, served.wire.request(1, "a", 50))
        deadline_s = time.monotonic() + TIMEOUT_S
        while backend.requests:
            assert time.monotonic() < deadline_s, "the batch of a client that is gone stays for ever"
            time.sleep(0.02)
