"""The protocol between a runner and the benchmark: JSON, one object a line. Uses only Python's standard library.

    runner → {"info": {"engine": "vllm", "version": "0.32.0", …}}          once, when the engine is ready
    bench  → {"requests": [{"prompt_ids": [1, 2], "max_new_tokens": 8, "arrival_s": 0.0}, …]}
    runner → {"seconds": 1.2, "requests": [{"num_tokens": 8, "ttft_s": 0.1, …}, …], "cache": {…}}

If an engine fails, its process ends with a traceback on standard error. A runner ends at the end of standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class RunRequest:
    prompt_ids: list[int]
    max_new_tokens: int
    """Exact number of tokens to generate, greedily: end-of-sequence tokens are ignored."""
    arrival_s: float = 0.0
    """Seconds after the start at which the engine gets the request."""


@dataclass
class RequestTimes:
    """Times of one request, in seconds since its arrival."""

    num_tokens: int = 0
    ttft_s: float = 0.0
    end_s: float = 0.0
    """Time of its last token."""
    longest_gap_s: float = 0.0
    """Longest time between two consecutive tokens."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was found instead of computed; None if the engine does not report it."""


class Recorder:
    """Records one repetition: gives requests to the engine when they arrive, and records the times of their tokens.

    The clock starts when the recorder is made.
    """

    def __init__(self, requests: Iterable[RunRequest]) -> None:
        self.requests = sorted(requests, key=lambda request: request.arrival_s)
        self.times = [RequestTimes() for _ in self.requests]
        self._num_arrived = 0
        self._num_missing = sum(request.max_new_tokens for request in self.requests)
        self._start_s = time.perf_counter()

    @property
    def is_done(self) -> bool:
        """Whether every request has all its tokens."""
        return self._num_missing == 0

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def restart_clock(self) -> None:
        """Restarts the clock, for an engine that first had to prepare something that is not part of the work."""
        self._start_s = time.perf_counter()

    def due(self) -> list[int]:
        """Indices of the requests that have arrived since the last call."""
        first, now_s = self._num_arrived, self.now_s
        while self._num_arrived < len(self.requests) and self.requests[self._num_arrived].arrival_s <= now_s:
            self._num_arrived += 1
        return list(range(first, self._num_arrived))

    @property
    def next_arrival_in_s(self) -> float | None:
        """Seconds until the next request arrives, at least 0; None after the last one."""
        if self._num_arrived == len(self.requests):
            return None
        return max(0.0, self.requests[self._num_arrived].arrival_s - self.now_s)

    def wait(self) -> None:
        """Sleeps until the next request arrives; for an engine that has nothing to do."""
        wait_s = self.next_arrival_in_s
        if wait_s is None:
            raise RuntimeError("the engine has nothing to do, but tokens are missing")
        time.sleep(wait_s)

    def count(self, index: int, num_tokens: int = 1, num_cached_tokens: int | None = None) -> None:
        """Records new tokens of a request.

        Raises:
            RuntimeError: the request has more tokens than it asked for.
        """
        if not num_tokens:
            return
        times, request = self.times[index], self.requests[index]
        now_s = self.now_s - request.arrival_s
        if not times.num_tokens:
            times.ttft_s, times.num_cached_tokens = now_s, num_cached_tokens
        else:
            times.longest_gap_s = max(times.longest_gap_s, now_s - times.end_s)
        times.end_s = now_s
        times.num_tokens += num_tokens
        self._num_missing -= num_tokens
        if times.num_tokens > request.max_new_tokens:
            raise RuntimeError(f"a request for {request.max_new_tokens} tokens got {times.num_tokens}")


class RunEngine(ABC):
    """A loaded engine."""

    info: dict[str, Any]
    """`engine`, `version`, and other facts that affect its figures: dtypes, threads."""

    @abstractmethod
    def run(self, recorder: Recorder) -> dict[str, Any]:
        """Serves all requests of a repetition, greedily and as fast as it can.

        Returns:
            Figures of its cache: peak_kv_bytes, waste (0..1), peak_running. Empty if it has none.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing that does not end with their process
        """Ends processes that the engine started."""


def read_requests(message: dict[str, Any]) -> list[RunRequest]:
    return [RunRequest(**request) for request in message["requests"]]


def run_once(engine: RunEngine, requests: Iterable[RunRequest]) -> dict[str, Any]:
    """Runs one repetition. Returns the answer to the benchmark."""
    recorder = Recorder(requests)
    cache = engine.run(recorder)
    seconds = recorder.now_s
    return {"seconds": seconds, "requests": [asdict(times) for times in recorder.times], "cache": cache}


def serve(load: Callable[[], RunEngine]) -> None:
    """Loads an engine and serves repetitions until standard input ends."""
    answers = _take_over_stdout()
    engine = load()
    try:
        _say(answers, {"info": engine.info})
        for line in sys.stdin:
            _say(answers, run_once(engine, read_requests(json.loads(line))))
    finally:
        engine.close()


def _take_over_stdout() -> TextIO:
    """Returns the real standard output. Output of libraries goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
