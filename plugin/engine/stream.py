"""Iterates over the tokens of one prompt as they are generated."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.plugin.engine.results import StreamPiece
from pagedkv.plugin.engine.running_request import RunningRequest
from pagedkv.plugin.errors import UnavailableError
from pagedkv.plugin.observer import Outcome
from pagedkv.plugin.serving.generation import Sample
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.thread_inbox import ThreadInbox


class TokenStream(Iterator[StreamPiece]):
    """Iterates over the tokens of one request. Closing or dropping the stream ends the request.

    Tokens are generated ahead of the reader, up to `MAX_UNREAD_STEPS` of them.

    Args:
        loop: that runs the request.
        sample: the request, as the loop keeps it.
        request: its text.
        inbox: where its tokens come.
    """

    def __init__(self, loop: ServingLoop, sample: Sample, request: RunningRequest, inbox: ThreadInbox) -> None:
        self._loop = loop
        self._sample = sample
        self._request = request
        self._inbox = inbox
        self._is_closed = False

    def __next__(self) -> StreamPiece:
        """Returns the next piece.

        Raises:
            StepError: a step of the request failed.
            UnavailableError: the engine was closed.
        """
        while not self._request.pieces:
            if self._request.error:
                raise self._request.error
            if self._request.is_done or self._is_closed:
                raise StopIteration
            self._take_step()
        return self._request.pieces.popleft()

    def close(self) -> None:
        """Ends the request, frees its blocks, and drops unread tokens. A second call does nothing."""
        self._end(Outcome.ABORTED)
        self._request.pieces.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector runs it anywhere, maybe while this very thread holds the engine's locks.
        if not self._is_closed and not self._request.is_done:
            self._loop.drop([self._sample])

    def _take_step(self) -> None:
        try:
            for _, output in self._inbox.read():
                self._request.take(output)
        except BaseException as error:
            self._end(Outcome.ABORTED)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._request.fail(error)
            return
        if self._request.has_stopped:
            self._end(Outcome.STOP_SEQUENCE)

    def _end(self, outcome: Outcome) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.abort([self._sample], outcome)
        except UnavailableError:
            return  # with the engine all requests have ended
