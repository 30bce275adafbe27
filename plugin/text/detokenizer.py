"""Decodes token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.plugin.interface import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not a whole UTF-8 character, or not yet."""

MAX_CHARACTER_TOKENS = 4
"""Most tokens that can form one character: UTF-8 has at most four bytes a character."""

_CONTEXT_TOKENS = 5
_MAX_WINDOW_TOKENS = 8


def prompt_context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Returns the last prompt tokens, as many as are needed to decode the tokens that follow.

    A decoder drops the leading space of a text, and one that falls back to bytes breaks a whole run of them if the run
    begins inside a character. So generated tokens are decoded after a few prompt tokens that begin with a character.
    """
    num_tokens = _CONTEXT_TOKENS
    while num_tokens < min(len(prompt_ids), _CONTEXT_TOKENS + MAX_CHARACTER_TOKENS - 1):
        if not tokenizer.decode(prompt_ids[-num_tokens:]).startswith(REPLACEMENT):
            break
        num_tokens += 1
    return list(prompt_ids[-num_tokens:])


def text_after(prefix: str, text: str) -> str:
    """Returns what `text` adds to `prefix`, the decoded beginning of the same tokens.

    If the prefix ended inside a character that the further tokens complete, that character counts as added.
    """
    if text.startswith(prefix):
        return text[len(prefix) :]
    return text[len(prefix.rstrip(REPLACEMENT)) :]


class Detokenizer:
    """Decodes the text of one sequence token by token.

    A token alone can't be decoded: it may be part of a character, and its leading space depends on what precedes it.
    So a short window of tokens is decoded each time, and its new text is returned once it ends in a whole character.
    Until then the text is held back; the token that completes the character returns all of it.

    Args:
        tokenizer: decodes the window.
        prompt_ids: the tokens before the generated ones; their text is never returned.
    """

    __slots__ = ("_decode", "_held", "_last_start", "_num_given", "_prefix", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window = prompt_context(tokenizer, prompt_ids)
        self._num_given = len(self._window)  # tokens of the window whose text was returned or is held
        self._last_start = 0  # index in the window of the tokens that were returned last
        self._prefix = self._decode(self._window)  # their text
        self._held = ""

    def push(self, token_id: int) -> str:
        """Appends a token.

        Returns:
            The text that the token completes; empty while the last character is incomplete.
        """
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            self._bound_pending(text)
            return ""
        new_text = self._held + text_after(self._prefix, text)
        self._held = ""
        self._prefix = text
        self._last_start, self._num_given = self._num_given, len(self._window)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._drop_before(self._last_start)
        return new_text

    def _drop_before(self, start: int) -> None:
        del self._window[:start]
        self._last_start = 0
        self._num_given -= start
        self._prefix = self._decode(self._window[: self._num_given])

    def _bound_pending(self, text: str) -> None:
        """Moves the final part of a long run of broken bytes to held text, so that the window stays short.

        Text from tokens further back than one character can't change any more, unless the cut splits a character. Then
        the text does not begin with that of the part, and a cut one token later works.
        """
        if len(self._window) - self._num_given <= _MAX_WINDOW_TOKENS:
            return
        num_settled = len(self._window) - MAX_CHARACTER_TOKENS
        settled = self._decode(self._window[:num_settled])
        if text.startswith(settled):
            self._held += text_after(self._prefix, settled)
            self._num_given = num_settled
            self._drop_before(num_settled - MAX_CHARACTER_TOKENS)
