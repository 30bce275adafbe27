"""The order of calls on rank 0, which decides it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from pagedkv.adapters.tgi.call_channel import CallChannel
from pagedkv.adapters.tgi.call_order import CallOrder, Metadata, OrderedCall, OrderedStepLoop
from pagedkv.adapters.tgi.status import describe_error
from pagedkv.plugin.errors import PagedKVError, UnavailableError

T = TypeVar("T")


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
        code, details = _describe_end(call)
        # Elsewhere nobody waits to hear that a call went well.
        can_wait = code == grpc.StatusCode.OK.name
        self._channel.send(("end", call.number, call.is_claimed, code, details), can_wait=can_wait)
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
