"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.plugin.interface import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole UTF-8 character (or not one yet)."""

MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so no more tokens than that can take part in it."""

_CONTEXT_TOKENS = 5
_MAX_WINDOW_TOKENS = 8


def prompt_context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last prompt tokens, as many as decoding what follows them needs.

    A decoder drops the leading space of a text, and one that falls back to bytes spoils a whole run of them if the run
    begins inside a character. So generated tokens are decoded behind a few prompt tokens that begin with a character.
    """
    num_tokens = _CONTEXT_TOKENS
    while num_tokens < min(len(prompt_ids), _CONTEXT_TOKENS + MAX_CHARACTER_TOKENS - 1):
        if not tokenizer.decode(prompt_ids[-num_tokens:]).startswith(REPLACEMENT):
            break
        num_tokens += 1
    return list(prompt_ids[-num_tokens:])


def text_after(prefix: str, text: str) -> str:
    """What `text` adds to `prefix`, the decoded beginning of the same tokens.

    Where the prefix ended inside a character that the further tokens complete, the character counts as added.
    """
    if text.startswith(prefix):
        return text[len(prefix) :]
    return text[len(prefix.rstrip(REPLACEMENT)) :]


class Detokenizer:
    """The text of one sequence as its tokens come.

    A token alone can't be decoded: it may be part of a character, and its leading space depends on what precedes it.
    So a short window of tokens is decoded each time, and what is new in it is given out once it ends in a whole
    character. Until then the text is held back; the token that completes the character carries all of it.

    Args:
        tokenizer: decodes the window.
        prompt_ids: what the sequence begins with; never given out.
    """

    __slots__ = ("_decode", "_held", "_last_start", "_num_given", "_prefix", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window = prompt_context(tokenizer, prompt_ids)
        self._num_given = len(self._window)  # tokens of the window whose text has been given out or is held
        self._last_start = 0  # where in the window the tokens begin that were given out last
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
        """Holds the settled part of a long run of broken bytes as text, so that the window stays short.

        What lies more than a character's tokens back can't change any more, unless the cut goes through a character;
        then the text does not begin with that of the part, and a cut a token later will do.
        """
        if len(self._window) - self._num_given <= _MAX_WINDOW_TOKENS:
            return
        num_settled = len(self._window) - MAX_CHARACTER_TOKENS
        settled = self._decode(self._window[:num_settled])
        if text.startswith(settled):
            self._held += text_after(self._prefix, settled)
            self._num_given = num_settled
            self._drop_before(num_settled - MAX_CHARACTER_TOKENS)
