"""The order of calls on ranks other than 0, as rank 0 tells it."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from pagedkv.adapters.tgi.call_channel import CallChannel
from pagedkv.adapters.tgi.call_order import (
    CallKey,
    CallOrder,
    Metadata,
    OrderedCall,
    OrderedJob,
    OrderedStepLoop,
    make_key,
)
from pagedkv.adapters.tgi.status import read_error
from pagedkv.plugin.errors import UnavailableError

CLAIM_TIMEOUT_S = 10.0
"""How long a call on another rank waits for rank 0 to get it too, and how long an answer waits for its client there."""

T = TypeVar("T")


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
    def _job(call: OrderedCall, index: int) -> OrderedJob:
        if index == len(call.jobs):
            call.jobs.append(OrderedJob())
        return call.jobs[index]

    @staticmethod
    def _forget_empty(queues: dict[CallKey, deque[Any]], key: CallKey) -> None:
        if not queues.get(key):
            queues.pop(key, None)
