"""Runs an engine in a separate process. Between repetitions the process is stopped, so that it uses no core."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pagedkv.integration.measure.benchmark.runners.protocol import RequestTimes, RunRequest
from pagedkv.plugin.errors import PagedKVError

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG_TAIL_CHARS = 4000
_END_TIMEOUT_S = 20.0

# Python's own option where it is there: a preexec_fn forks, and what gRPC does in a fork can end the child.
_NEW_GROUP: Mapping[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


class EngineFailedError(PagedKVError):
    """An engine did not start, ended, took too long, or gave a wrong answer."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine is started."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Results of one engine in one repetition."""

    seconds: float
    """Time from the start to the last token."""
    prompt_tokens: int
    new_tokens: int
    requests: Sequence[RequestTimes]
    cache: Mapping[str, Any]
    """Cache figures from `RunEngine.run`."""


class EngineProcess:
    """Context manager that runs a loaded engine.

    Args:
        folder: working directory of the engine, and folder of its log.
        timeout_s: longest time for loading, and for each repetition.

    Raises:
        EngineFailedError: the engine did not start; the message ends with its last log lines.
    """

    def __init__(self, spec: EngineSpec, folder: Path, timeout_s: float) -> None:
        self.name = spec.name
        self._timeout_s = timeout_s
        self._received = b""
        self._log = folder.absolute() / f"{spec.name}.log"
        try:
            with self._log.open("wb") as errors:
                self._process = subprocess.Popen(  # noqa: S603 - the user names the interpreter
                    spec.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=folder,
                    env={**os.environ, **spec.environ},
                    # A separate process group, to stop it as a whole. It stays in our session: if the benchmark dies,
                    # the system continues the stopped group and sends it SIGHUP.
                    **_NEW_GROUP,
                )
        except OSError as error:
            raise EngineFailedError(f"{spec.name} can't be started: {spec.command[0]}: {error.strerror}") from error
        try:
            self.info: Mapping[str, Any] = self._receive("was not ready")["info"]
            self._stop()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, requests: Sequence[RunRequest]) -> Repetition:
        """Runs one repetition. Raises EngineFailedError."""
        message = json.dumps({"requests": [asdict(request) for request in requests]})
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        # If the process has ended, reading its answer gives the better error.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        answer = self._receive("was not done")
        self._stop()
        times = [RequestTimes(**one) for one in answer["requests"]]
        wanted = [request.max_new_tokens for request in sorted(requests, key=lambda request: request.arrival_s)]
        made = [one.num_tokens for one in times]
        if made != wanted:
            raise self._failure(f"made {sum(made)} tokens where {sum(wanted)} were asked for")
        num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        return Repetition(answer["seconds"], num_prompt_tokens, sum(made), times, answer["cache"])

    def close(self) -> None:
        """Ends the engine and all processes that it started. A second call does nothing."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _receive(self, late: str) -> dict[str, Any]:
        """Reads the engine's next line of JSON."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise self._failure(f"{late} within {self._timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 2**16)
                if not piece:
                    raise self._failure(f"ended with code {self._process.wait()}")
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._failure(f"said something else than JSON: {line[:200]!r}") from None
        return answer

    def _failure(self, what: str) -> EngineFailedError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:].strip()
        return EngineFailedError(f"{self.name} {what}; its standard error ends with:\n{tail or '(nothing)'}")

    def _stop(self) -> None:
        """Stops the process group, and waits until it is stopped or has ended."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
