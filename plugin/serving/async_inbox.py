"""Tokens from the step thread to coroutines of one event loop: one hand-over a step, however many samples it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagedkv.plugin.errors import OverloadedError, PagedKVError
from pagedkv.plugin.observer import Outcome
from pagedkv.plugin.requests import StepOutput
from pagedkv.plugin.serving.generation import GenerationRequest, Sample
from pagedkv.plugin.serving.loop import ServingLoop

MAX_UNREAD_TOKENS = 16384
"""Of one generation; its reader is too slow, and it ends alone."""

Tokens = list[tuple[Sample, StepOutput]]


class AsyncInbox:
    """Hands a loop's tokens to the generations of one event loop. Made on that loop."""

    def __init__(self, loop: ServingLoop) -> None:
        self._loop = loop
        self._event_loop = asyncio.get_running_loop()

    async def start(self, request: GenerationRequest) -> AsyncGeneration:
        """Takes a prompt; returns once the backend has accepted it. Raises as the future of `ServingLoop.start` does.

        A caller that is cancelled meanwhile leaves nothing behind.
        """
        generation = AsyncGeneration(self._loop)
        future = self._loop.start(request, self, generation)
        try:
            generation.samples = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else self._loop.abort(done.result())
            )
            raise
        return generation

    is_full = False
    """A generation whose reader is too slow ends: the process has many clients, and this one holds their room."""

    def deliver(self, outputs: Tokens) -> None:
        self._event_loop.call_soon_threadsafe(_dispatch, outputs)

    def fail(self, samples: Sequence[Sample], error: PagedKVError) -> None:
        self._event_loop.call_soon_threadsafe(_dispatch_failure, samples, error)


class AsyncGeneration:
    """The tokens of one prompt's samples, as they come. Made by `AsyncInbox.start`; read by one coroutine."""

    def __init__(self, loop: ServingLoop) -> None:
        self.samples: list[Sample] = []
        self._loop = loop
        self._unread: Tokens = []
        self._error: PagedKVError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._ended: set[int] = set()

    async def read(self) -> Tokens:
        """Everything that has come since the last call, at least one token; empty once every sample has ended.

        Raises:
            StepError: a step failed.
            OverloadedError: the reader was too slow.
            UnavailableError: the server has ended.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if len(self._ended) == len(self.samples):
                return []
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        tokens, self._unread = self._unread, []
        return tokens

    def end(self, sample: Sample, outcome: Outcome) -> None:
        """Ends a sample before its time: what still comes of it is dropped."""
        if sample.index not in self._ended:
            self._ended.add(sample.index)
            self._loop.abort([sample], outcome)

    def abort(self) -> None:
        """Ends the samples that still run, and lets the reader see the end."""
        self.close()
        self._wake()

    def close(self, outcome: Outcome = Outcome.ABORTED) -> None:
        """Ends the samples that still run. A second call does nothing."""
        running = [sample for sample in self.samples if sample.index not in self._ended]
        self._ended.update(sample.index for sample in running)
        if running:
            self._loop.abort(running, outcome)

    def _take(self, sample: Sample, output: StepOutput) -> None:
        if sample.index in self._ended:
            return
        if output.finish_reason is not None:
            self._ended.add(sample.index)
        self._unread.append((sample, output))
        if len(self._unread) > MAX_UNREAD_TOKENS:
            self.close()
            self._fail(OverloadedError(f"{len(self._unread)} tokens were not read; the request has ended"))

    def _fail(self, error: PagedKVError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _dispatch(outputs: Tokens) -> None:
    for sample, output in outputs:
        generation = sample.consumer
        assert isinstance(generation, AsyncGeneration)
        generation._take(sample, output)
        generation._wake()


def _dispatch_failure(samples: Sequence[Sample], error: PagedKVError) -> None:
    for sample in samples:
        generation = sample.consumer
        assert isinstance(generation, AsyncGeneration)
        generation._ended.add(sample.index)
        generation._fail(error)
