"""One order of calls on all shards of a model, decided by rank 0.

A router sends each call to all shards at once, but calls overtake one another, reach some shards only, and are
cancelled on one shard before another. So only rank 0 takes calls in. It sends each one, content and all, to the other
shards, which run it from there; the same call of a client is matched with it by method and content, and only fetches
the answer. A job of a call runs on the step thread: rank 0 announces each job's turn as it queues it, and the others
run the same jobs in the same order, however long each takes to prepare its own.

What decides anything belongs into a job. What runs on the event loop may depend on the call's content alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pagedkv.adapters.tgi.call_channel import CallChannel
from pagedkv.adapters.tgi.step_loop import StepLoop
from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.serving.step_thread import StepThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
Job = Callable[[], Any]
CallKey = tuple[str, bytes]


@dataclass(slots=True)
class CallContext:
    """What a method sees of a call, on all shards alike: the metadata that rank 0 got."""

    metadata: Metadata = ()
    trailing_metadata: Metadata = ()

    def invocation_metadata(self) -> Metadata:
        return self.metadata

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing_metadata = tuple(metadata)


RunMethod = Callable[[bytes, CallContext], Awaitable[Any]]


class JobRunner(Protocol):
    """Decides when a job of a call runs."""

    async def run_job(self, call: OrderedCall, job: Callable[[], T]) -> T: ...


@dataclass(slots=True, eq=False)
class OrderedCall:
    """A call that runs on all shards."""

    number: int
    key: CallKey
    task: asyncio.Task[tuple[Any, Metadata]] | None = None
    """Runs the method; the result is what it returns, and its trailing metadata."""
    num_turns: int = 0
    """Jobs whose turn rank 0 has announced."""
    jobs: list[OrderedJob] = field(default_factory=list)
    """On ranks other than 0: jobs given or announced so far."""
    num_given_jobs: int = 0
    is_claimed: bool = False
    """Whether a client waits for the result here."""
    end_on_rank_0: PagedKVError | None = None
    """On ranks other than 0, once rank 0 has ended the call: what a job gets that rank 0 has not run."""

    @property
    def running(self) -> asyncio.Task[tuple[Any, Metadata]]:
        assert self.task is not None
        return self.task


class OrderedJob:
    """A job of one shard, whose turn may come before it is ready, or after."""

    def __init__(self) -> None:
        self.job: Future[Job] = Future()
        self.result: Future[Any] = Future()

    def run(self) -> None:
        """Runs on the step thread, when it is the job's turn. Waits for the job."""
        try:
            self.result.set_result(self.job.result()())
        except BaseException as error:
            self.result.set_exception(error)


_current_call: ContextVar[OrderedCall | None] = ContextVar("pagedkv_ordered_call", default=None)


class OrderedStepLoop(StepLoop):
    """A step loop whose jobs of a call run in the order of all shards; jobs outside of calls are this shard's alone."""

    def __init__(self, thread: StepThread | None = None) -> None:
        super().__init__(thread)
        self.runner: JobRunner | None = None
        """Set by the order of calls that uses this loop."""

    async def run(self, job: Callable[[], T]) -> T:
        call = _current_call.get()
        if call is None:
            return await super().run(job)
        assert self.runner is not None
        return await self.runner.run_job(call, job)

    def post(self, job: Callable[[], object]) -> None:
        # A call is cancelled only as a whole and by rank 0, which then clears up in a call of its own.
        if _current_call.get() is None:
            super().post(job)


class CallOrder(ABC):
    """What both sides of the order have in common.

    Args:
        channel: to the other shards.
        step_loop: where the jobs of calls run.
        fail: ends all shards, with a message.
    """

    def __init__(self, channel: CallChannel, step_loop: OrderedStepLoop, fail: Callable[[str], None]) -> None:
        self._channel = channel
        self._step_loop = step_loop
        self._fail = fail
        self._methods: Mapping[str, RunMethod] = {}
        self._is_stopped = False
        step_loop.runner = self

    async def open(self, methods: Mapping[str, RunMethod]) -> None:
        """Starts to run calls.

        Args:
            methods: by name, what runs a call's content.
        """
        self._methods = methods
        await self._channel.open(self._receive)

    def close(self) -> None:
        """Closes the connections. A second call does nothing."""
        self._is_stopped = True
        self._channel.close()

    @abstractmethod
    async def call(self, method: str, content: bytes, metadata: Metadata) -> tuple[Any, Metadata]:
        """Runs a call on all shards, or waits for it to be run; returns its result here and trailing metadata.

        A caller that is cancelled removes nothing from the order.

        Raises:
            UnavailableError: the shards stop, or the call has not reached rank 0.
            Exception: what the method raises.
        """

    @abstractmethod
    async def run_job(self, call: OrderedCall, job: Callable[[], T]) -> T:
        """Runs a job of a call in its turn."""

    @abstractmethod
    def _receive(self, header: list[Any], content: bytes) -> None: ...

    def _start(self, number: int, method: str, content: bytes, metadata: Metadata) -> OrderedCall:
        call = OrderedCall(number, make_key(method, content))
        call.task = asyncio.get_running_loop().create_task(self._execute(call, method, content, metadata))
        return call

    async def _execute(
        self, call: OrderedCall, method: str, content: bytes, metadata: Metadata
    ) -> tuple[Any, Metadata]:
        _current_call.set(call)
        context = CallContext(metadata)
        result = await self._methods[method](content, context)
        return result, context.trailing_metadata

    def _log_unheard(self, call: OrderedCall) -> None:
        """Logs the error of a call that nobody waits for."""
        if not call.running.cancelled() and (error := call.running.exception()) and not isinstance(error, PagedKVError):
            logger.error("call %d (%s) failed", call.number, call.key[0], exc_info=error)


def make_key(method: str, content: bytes) -> CallKey:
    """Returns what identifies equal calls of different shards."""
    return method, hashlib.blake2b(content, digest_size=16).digest()
