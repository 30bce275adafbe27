"""What one client gets: an answer of one or more pieces."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from pagedkv.adapters.tgi import generate_pb2 as pb

from .validation import Ask


class Ending(Enum):
    FINISHED = "finished"
    FAILED = "failed"
    """An error of some call; the client gets 424."""
    LOST = "lost"
    """The loop ended without it; the client gets "incomplete generation"."""
    LEFT = "left"
    """The client went away."""


@dataclass
class Stream:
    """One client and what it got. It may go away at any time, which is noticed at its next generation."""

    ask: Ask
    """As it stands: the text grows with each piece."""
    max_total_new_tokens: int
    prefill: list[tuple[int, float, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_pieces: int = 1
    text: str = ""
    """The generated text, once it has ended."""
    finish_reason: int | None = None
    ending: Ending | None = None
    error: str = ""

    @property
    def is_gone(self) -> bool:
        return self.ending is Ending.LEFT

    def leave(self) -> None:
        """The client closes its connection."""
        if self.ending is None:
            self.ending = Ending.LEFT

    def fail(self, error: str) -> None:
        if self.ending is None:
            self.ending, self.error = Ending.FAILED, error

    def lose(self) -> None:
        if self.ending is None:
            self.ending = Ending.LOST

    def take_tokens(self, generation: pb.Generation) -> None:
        """All of a generation but its end."""
        if generation.HasField("prefill_tokens"):
            prefill = generation.prefill_tokens
            # Zipped: of lists of unequal lengths the rest is lost.
            self.prefill = list(zip(prefill.ids, prefill.logprobs, prefill.texts, strict=False))
        self.ids += generation.tokens.ids
        self.texts += generation.tokens.texts

    def wants_more(self, end: pb.GeneratedText) -> bool:
        """Takes the end of a piece. Returns whether the rest of the answer is to be asked for with `ask`."""
        self.text += end.text
        self.finish_reason = end.finish_reason
        if end.finish_reason == pb.FINISH_REASON_LENGTH and len(self.ids) < self.max_total_new_tokens:
            self.ask = replace(self.ask, inputs=self.ask.inputs + end.text)
            return True
        self.finish()
        return False

    def finish(self) -> None:
        """All that will come has come."""
        self.ending = Ending.FINISHED
