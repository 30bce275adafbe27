"""Iterates over the tokens of one prompt as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagedkv.plugin.engine.results import StreamPiece
from pagedkv.plugin.engine.running_request import RunningRequest


class TokenStream(Iterator[StreamPiece]):
    """Iterates over the tokens of one request. Closing or dropping the stream ends the request.

    Args:
        request: a request that the backend has accepted.
        step: runs a step of the engine, unless the request got a token meanwhile.
        abort: ends the request if it still runs.
    """

    def __init__(
        self,
        request: RunningRequest,
        step: Callable[[RunningRequest], None],
        abort: Callable[[list[RunningRequest]], None],
    ) -> None:
        self._request = request
        self._step = step
        self._abort = abort
        self._is_closed = False

    def __next__(self) -> StreamPiece:
        """Returns the next piece. Raises StepError if a step of the request failed."""
        while not self._request.pieces:
            if self._request.error:
                raise self._request.error
            if self._request.is_done or self._is_closed:
                raise StopIteration
            self._step(self._request)
        return self._request.pieces.popleft()

    def close(self) -> None:
        """Ends the request, frees its blocks, and drops unread tokens. A second call does nothing."""
        self._is_closed = True
        self._abort([self._request])
        self._request.pieces.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
