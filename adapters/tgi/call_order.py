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
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc

from pagedkv.adapters.tgi.call_channel import CallChannel
from pagedkv.adapters.tgi.status import describe_error, read_error
from pagedkv.adapters.tgi.step_loop import StepLoop
from pagedkv.plugin.errors import PagedKVError, UnavailableError
from pagedkv.plugin.serving.step_thread import StepThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
Job = Callable[[], Any]
CallKey = tuple[str, bytes]

CLAIM_TIMEOUT_S = 10.0
"""How long a call on another rank waits for rank 0 to get it too, and how long an answer waits for its client there."""


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
    jobs: list[_OrderedJob] = field(default_factory=list)
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


class _OrderedJob:
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


class LeadingOrder(CallOrder):
    """The order on rank 0.

    Args:
        on_drain_asked: called when another shard asks for a drain.
        clear_after: starts the calls that end what a call of a client that went away has left; gets its method,
            content, and result, None where it failed.
    """

    def __init__(
        self,
        channel: CallChannel,
        step_loop: OrderedStepLoop,
        fail: Callable[[str], None],
        *,
        on_drain_asked: Callable[[], None],
        clear_after: Callable[[str, bytes, Any], None],
    ) -> None:
        super().__init__(channel, step_loop, fail)
        self._on_drain_asked = on_drain_asked
        self._clear_after = clear_after
        self._num_calls = 0
        self._running: set[OrderedCall] = set()

    async def call(self, method: str, content: bytes, metadata: Metadata) -> tuple[Any, Metadata]:
        call = self._begin(method, content, metadata)
        call.is_claimed = True
        try:
            return await asyncio.shield(call.running)
        except asyncio.CancelledError:
            if not call.running.done():
                self._give_up(call, method, content)
            raise

    def begin(self, method: str, content: bytes) -> None:
        """Runs a call on all shards that no client waits for."""
        if not self._is_stopped:
            self._begin(method, content, ())

    def stop(self) -> None:
        """Refuses calls, and jobs of calls that run, from now on."""
        self._is_stopped = True

    async def run_job(self, call: OrderedCall, job: Callable[[], T]) -> T:
        if self._is_stopped:
            raise UnavailableError("the server has stopped; send requests elsewhere")
        self._channel.send(("turn", call.number))
        call.num_turns += 1
        return await asyncio.wrap_future(self._step_loop.submit(job))

    def _begin(self, method: str, content: bytes, metadata: Metadata) -> OrderedCall:
        if self._is_stopped:
            raise UnavailableError("the server has stopped; send requests elsewhere")
        self._num_calls += 1
        self._channel.send(("call", self._num_calls, method, metadata), content)
        call = self._start(self._num_calls, method, content, metadata)
        self._running.add(call)
        call.running.add_done_callback(lambda task: self._end(call))
        return call

    def _end(self, call: OrderedCall) -> None:
        self._running.discard(call)
        self._channel.send(("end", call.number, call.is_claimed, *_describe_end(call)))
        if not call.is_claimed:
            self._log_unheard(call)

    def _give_up(self, call: OrderedCall, method: str, content: bytes) -> None:
        """The client is gone. A call without a job so far is dropped on all shards; any other is run to its end."""
        call.is_claimed = False
        if not call.num_turns:
            call.running.cancel()
            return

        def clear_up(task: asyncio.Task[tuple[Any, Metadata]]) -> None:
            has_result = not task.cancelled() and task.exception() is None
            self._clear_after(method, content, task.result()[0] if has_result else None)

        call.running.add_done_callback(clear_up)

    def _receive(self, header: list[Any], content: bytes) -> None:
        assert header == ["drain"]
        self._on_drain_asked()


class FollowingOrder(CallOrder):
    """The order on any other rank.

    Args:
        rank: of this shard.
        claim_timeout_s: as CLAIM_TIMEOUT_S.
    """

    def __init__(
        self,
        channel: CallChannel,
        step_loop: OrderedStepLoop,
        fail: Callable[[str], None],
        *,
        rank: int,
        claim_timeout_s: float = CLAIM_TIMEOUT_S,
    ) -> None:
        super().__init__(channel, step_loop, fail)
        self._rank = rank
        self._claim_timeout_s = claim_timeout_s
        self._calls: dict[int, OrderedCall] = {}
        """By number, until they have ended here and on rank 0."""
        self._unclaimed: dict[CallKey, deque[OrderedCall]] = defaultdict(deque)
        self._clients: dict[CallKey, deque[asyncio.Future[OrderedCall]]] = defaultdict(deque)

    @property
    def num_unclaimed(self) -> int:
        """Calls whose client has not asked here so far."""
        return sum(map(len, self._unclaimed.values()))

    def ask_for_drain(self) -> None:
        """Asks rank 0 to drain all shards."""
        self._channel.send(("drain",))

    async def call(
        self, method: str, content: bytes, metadata: Metadata, timeout_s: float | None = None
    ) -> tuple[Any, Metadata]:
        call = await self._claim(make_key(method, content), self._claim_timeout_s if timeout_s is None else timeout_s)
        try:
            return await asyncio.shield(call.running)
        except asyncio.CancelledError:
            if call.running.cancelled():
                raise UnavailableError("the client of this call went away on rank 0: it was not run") from None
            raise

    async def run_job(self, call: OrderedCall, job: Callable[[], T]) -> T:
        if call.end_on_rank_0 and call.num_given_jobs == call.num_turns:
            raise call.end_on_rank_0
        ordered = self._job(call, call.num_given_jobs)
        call.num_given_jobs += 1
        ordered.job.set_result(job)
        return await asyncio.wrap_future(ordered.result)

    def close(self) -> None:
        super().close()
        for clients in self._clients.values():
            for client in clients:
                if not client.done():
                    client.set_exception(UnavailableError("the server has stopped; send requests elsewhere"))

    async def _claim(self, key: CallKey, timeout_s: float) -> OrderedCall:
        if key in self._unclaimed:
            # Equal calls follow one another: the newest is this client's, and those before it belong to clients that
            # went away.
            call = self._unclaimed[key].pop()
            self._forget_empty(self._unclaimed, key)
        else:
            if self._is_stopped:
                raise UnavailableError("the server has stopped; send requests elsewhere")
            call = await self._wait_for(key, timeout_s)
        call.is_claimed = True
        return call

    async def _wait_for(self, key: CallKey, timeout_s: float) -> OrderedCall:
        client: asyncio.Future[OrderedCall] = asyncio.get_running_loop().create_future()
        self._clients[key].append(client)
        try:
            return await asyncio.wait_for(client, timeout_s)
        except asyncio.TimeoutError:
            raise UnavailableError(
                f"this {key[0]} has reached rank {self._rank}, but not rank 0 within {timeout_s:g} s: send every call "
                "to all shards at once"
            ) from None
        finally:
            if client in self._clients[key]:
                self._clients[key].remove(client)
            self._forget_empty(self._clients, key)

    def _offer(self, call: OrderedCall) -> None:
        """Gives a call to the newest client that waits for it; keeps it for a later one where there is none."""
        clients = reversed(self._clients.get(call.key, ()))
        client = next((client for client in clients if not client.done()), None)
        if client is None:
            self._unclaimed[call.key].append(call)
        else:
            client.set_result(call)

    def _receive(self, header: list[Any], content: bytes) -> None:
        kind, number, *rest = header
        if kind == "call":
            method, metadata = rest
            call = self._start(number, method, content, tuple((key, value) for key, value in metadata))
            self._calls[number] = call
            call.running.add_done_callback(lambda task: self._end(call))
            self._offer(call)
        elif kind == "turn":
            self._take_turn(self._calls.get(number), number)
        else:
            self._end_on_rank_0(self._calls.get(number), *rest)

    def _take_turn(self, call: OrderedCall | None, number: int) -> None:
        if call is None or (call.running.done() and call.num_given_jobs <= call.num_turns):
            self._report_difference(number)
            return
        ordered = self._job(call, call.num_turns)
        call.num_turns += 1
        self._step_loop.submit(ordered.run)

    def _end_on_rank_0(self, call: OrderedCall | None, is_claimed: bool, code: str, details: str) -> None:
        if call is None:
            return
        call.end_on_rank_0 = read_error(grpc.StatusCode[code], details)
        for job in call.jobs[call.num_turns :]:
            job.result.set_exception(call.end_on_rank_0)
        if code == grpc.StatusCode.CANCELLED.name:
            call.running.cancel()
        if not is_claimed:
            self._drop(call)
        if call.running.done():
            self._forget(call)

    def _end(self, call: OrderedCall) -> None:
        for job in call.jobs[call.num_given_jobs :]:
            # The step thread waits for a job that will not come.
            job.job.set_exception(asyncio.CancelledError())
        if call.num_given_jobs < call.num_turns:
            self._report_difference(call.number, call)
        if not call.is_claimed:
            self._log_unheard(call)
        if call.end_on_rank_0:
            self._forget(call)

    def _forget(self, call: OrderedCall) -> None:
        if self._calls.pop(call.number, None) and not call.is_claimed:
            asyncio.get_running_loop().call_later(self._claim_timeout_s, self._drop, call)

    def _drop(self, call: OrderedCall) -> None:
        """Keeps a result no longer for a client."""
        if call in self._unclaimed.get(call.key, ()):
            self._unclaimed[call.key].remove(call)
            self._forget_empty(self._unclaimed, call.key)

    def _report_difference(self, number: int, call: OrderedCall | None = None) -> None:
        error = None if call is None or call.running.cancelled() else call.running.exception()
        reason = f": {type(error).__name__}: {error}" if error else ""
        self._fail(f"rank {self._rank} can't run call {number}, which rank 0 runs{reason}")

    @staticmethod
    def _job(call: OrderedCall, index: int) -> _OrderedJob:
        if index == len(call.jobs):
            call.jobs.append(_OrderedJob())
        return call.jobs[index]

    @staticmethod
    def _forget_empty(queues: dict[CallKey, deque[Any]], key: CallKey) -> None:
        if not queues.get(key):
            queues.pop(key, None)


def _describe_end(call: OrderedCall) -> tuple[str, str]:
    """Returns the name of the status code, and a text, that a call ended with on rank 0."""
    if call.running.cancelled():
        return grpc.StatusCode.CANCELLED.name, "the client of this call went away on rank 0: it was not run"
    error = call.running.exception()
    if error is None:
        return grpc.StatusCode.OK.name, "rank 0 has run this call with fewer steps than this rank"
    if not isinstance(error, PagedKVError):
        return grpc.StatusCode.INTERNAL.name, "rank 0 has failed to run this call; its log says more"
    code, details = describe_error(error)
    return code.name, details
