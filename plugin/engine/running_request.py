"""State of one request of the Python API."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedkv.plugin.engine.results import GenerationResult, StreamPiece
from pagedkv.plugin.requests import FinishReason, Request, StepOutput
from pagedkv.plugin.text.output_text import OutputText


@dataclass(slots=True)
class RunningRequest:
    request: Request
    text: OutputText
    called_s: float
    """Of time.monotonic, as the other times: when the caller asked for it."""
    outputs: list[StepOutput] = field(default_factory=list)
    pieces: deque[StreamPiece] = field(default_factory=deque)
    """Pieces that the caller has not read yet."""
    error: BaseException | None = None
    finish_reason: FinishReason | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ended the request. The backend does not know of this."""
        return self.finish_reason is FinishReason.STOP_SEQUENCE

    def fail(self, error: BaseException) -> None:
        """Ends the request with what reading it raises."""
        self.error = error

    def take(self, output: StepOutput) -> None:
        """Adds the next token. Drops it where a stop string has ended the request already."""
        if self.is_done:
            return
        self.last_token_s = time.monotonic()
        if not self.outputs:
            self.first_token_s = self.last_token_s
        self.outputs.append(output)
        text = self.text.push(output.token.token_id)
        self.finish_reason = output.finish_reason
        if self.finish_reason is None and self.text.has_stopped:
            self.finish_reason = FinishReason.STOP_SEQUENCE
        result = self.result() if self.finish_reason else None
        self.pieces.append(StreamPiece(output.token.token_id, text, output.token.logprob, result))

    def result(self, samples: Sequence[GenerationResult] = ()) -> GenerationResult:
        """Returns the whole result of a finished request."""
        assert self.finish_reason is not None
        first, num_later_tokens = self.outputs[0], len(self.outputs) - 1
        return GenerationResult(
            prompt_ids=list(self.request.prompt_ids),
            token_ids=[output.token.token_id for output in self.outputs],
            text=self.text.final_text(),
            finish_reason=self.finish_reason,
            logprobs=[output.token.logprob for output in self.outputs],
            top_tokens=[output.top_tokens for output in self.outputs],
            prefill_logprobs=first.prefill_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            seed=first.seed,
            ttft_s=self.first_token_s - self.called_s,
            tpot_s=(self.last_token_s - self.first_token_s) / num_later_tokens if num_later_tokens else 0.0,
            samples=tuple(samples),
        )
