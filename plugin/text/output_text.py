"""The generated text of one request and its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.text.detokenizer import MAX_CHARACTER_TOKENS, REPLACEMENT, Detokenizer, prompt_context, text_after


class OutputText:
    """Streams a request's text, looks for its stop strings, and gives the whole text at the end.

    Args:
        tokenizer: decodes the tokens.
        prompt_ids: the request's prompt, for context only: stop strings are not searched in it.
        stop: stop strings, matched literally; an empty one matches at once.
    """

    __slots__ = (
        "_context",
        "_decode",
        "_detokenizer",
        "_generated_ids",
        "_max_stop_chars",
        "_stop",
        "_tail",
        "has_stopped",
    )

    has_stopped: bool
    """Whether a stop string ends exactly at the end of the streamed text. It may begin inside a token, but a stop
    string that ends inside a token does not match."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decode = tokenizer.decode
        self._context = prompt_context(tokenizer, prompt_ids)
        self._detokenizer = Detokenizer(tokenizer, self._context)
        self._generated_ids: list[int] = []
        self._stop = tuple(stop)
        self._max_stop_chars = max(map(len, stop), default=0)
        self._tail = ""  # the end of the streamed text, long enough for the longest stop string
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """Appends a generated token and updates `has_stopped`.

        Returns:
            The text to stream for it. Special tokens keep their text; an incomplete character is held back.
        """
        self._generated_ids.append(token_id)
        text = self._detokenizer.push(token_id)
        if self._stop:
            tail = self._tail + text
            self._tail = tail[max(0, len(tail) - self._max_stop_chars) :]
            self.has_stopped = self._tail.endswith(self._stop)
        return text

    def final_text(self) -> str:
        """Returns the text of all generated tokens without the special ones, up to the last whole character.

        Includes a stop string. Excludes replacement characters at the end, which stand for an incomplete character.
        """
        prefix = self._decode(self._context, skip_special_tokens=True)
        text = self._text_of(self._generated_ids, prefix)
        if not text.endswith(REPLACEMENT):
            return text
        # A decoder that falls back to bytes also breaks whole characters beside the incomplete one: omit its tokens.
        end = len(self._generated_ids)
        candidates = (self._generated_ids[: max(0, end - i)] for i in range(MAX_CHARACTER_TOKENS))
        return max((self._text_of(ids, prefix).rstrip(REPLACEMENT) for ids in candidates), key=len)

    def _text_of(self, generated_ids: Sequence[int], prefix: str) -> str:
        return text_after(prefix, self._decode([*self._context, *generated_ids], skip_special_tokens=True))
