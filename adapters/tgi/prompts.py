"""Tokenizes prompts, and decodes single token ids."""

from __future__ import annotations

from functools import lru_cache

from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.requests import RequestId

_MIN_PROMPT_BYTES_LIMIT = 2**20
_BYTES_PER_POSITION = 64
_MAX_CACHED_TEXTS = 2**16

_MIN_TAIL_BYTES = 2**16
_TAIL_BYTES_PER_TOKEN = 16
_TAIL_GROWTH = 4
_MIN_CUT_TOKENS = 64
"""Tokens between where a text was cut and the first one kept: a cut inside a word changes the tokens next to it."""


def max_prompt_bytes(max_position_tokens: int) -> int:
    """The longest text that is tokenized at once, in bytes of UTF-8.

    Truncation comes after tokenizing, so without this limit a client that asks for the last few tokens of a huge text
    would cause minutes of work. 64 bytes a position is many times what tokens of any language take.
    """
    return max(_MIN_PROMPT_BYTES_LIMIT, _BYTES_PER_POSITION * max_position_tokens)


class PromptEncoder:
    """Tokenizes prompts with the truncation and special tokens that clients ask for.

    Args:
        tokenizer: of the model.
        max_bytes: of a longer text only the end is tokenized, as much as truncation needs.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._special_prefix = tokenizer.encode("", add_special_tokens=True)

    def encode(self, request_id: RequestId, text: str, truncate: int, add_special_tokens: bool) -> list[int]:
        """Returns the ids of the text's last tokens, at most `truncate`.

        Special tokens at the beginning are kept if `truncate` leaves room for more than them: a model that was trained
        with a first token gives poor output without it.

        Raises:
            RequestError: `truncate` is 0, or the text is too long to be tokenized and truncation does not shorten it.
        """
        if truncate < 1:
            raise RequestError(
                f"request {request_id}: truncate is 0; set it to the number of prompt tokens to keep at the most"
            )
        data = text.encode("utf-8")
        if len(data) <= self._max_bytes:
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = self._encode_end(request_id, data, truncate, add_special_tokens)
        if len(token_ids) <= truncate:
            return token_ids
        prefix = self._special_prefix if add_special_tokens else []
        if len(prefix) < truncate and token_ids[: len(prefix)] == prefix:
            return [*prefix, *token_ids[len(token_ids) - truncate + len(prefix) :]]
        return token_ids[-truncate:]

    def _encode_end(self, request_id: RequestId, data: bytes, truncate: int, add_special_tokens: bool) -> list[int]:
        """Ids of the end of a text (UTF-8) that is too long to be tokenized whole: some more than `truncate`."""
        num_bytes = min(max(_MIN_TAIL_BYTES, _TAIL_BYTES_PER_TOKEN * truncate), self._max_bytes)
        while True:
            # A character that the cut goes through is dropped.
            end = data[-num_bytes:].decode("utf-8", errors="ignore")
            token_ids = self._tokenizer.encode(end, add_special_tokens=add_special_tokens)
            if len(token_ids) >= truncate + _MIN_CUT_TOKENS:
                return token_ids
            if num_bytes == self._max_bytes:
                raise RequestError(
                    f"request {request_id}: the prompt has {len(data)} bytes of text, at most {self._max_bytes} are "
                    f"tokenized, and the end of it is no longer than the {truncate} tokens to keep; shorten it, or "
                    "lower truncate"
                )
            num_bytes = min(num_bytes * _TAIL_GROWTH, self._max_bytes)


class TokenTexts:
    """Decodes single tokens, each on its own, and knows which of them are special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.text_of = lru_cache(maxsize=_MAX_CACHED_TEXTS)(lambda token_id: tokenizer.decode([token_id]))
