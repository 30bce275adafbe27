"""Tokenizes prompts, and decodes single token ids."""

from __future__ import annotations

from functools import lru_cache

from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.requests import RequestId

_MIN_PROMPT_BYTES_LIMIT = 2**20
_BYTES_PER_POSITION = 64
_MAX_CACHED_TEXTS = 2**16


def max_prompt_bytes(max_position_tokens: int) -> int:
    """The longest prompt text that is tokenized, in bytes of UTF-8.

    Truncation comes after tokenizing, so without this limit a client that asks for the last few tokens of a huge text
    would cause minutes of work. 64 bytes a position is many times what tokens of any language take.
    """
    return max(_MIN_PROMPT_BYTES_LIMIT, _BYTES_PER_POSITION * max_position_tokens)


class PromptEncoder:
    """Tokenizes prompts with the truncation and special tokens that clients ask for.

    Args:
        tokenizer: of the model.
        max_bytes: longer texts are refused.
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
            RequestError: the text is too long to be tokenized, or `truncate` is 0.
        """
        if truncate < 1:
            raise RequestError(
                f"request {request_id}: truncate is 0; set it to the number of prompt tokens to keep at the most"
            )
        num_bytes = len(text.encode("utf-8"))
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"request {request_id}: the prompt has {num_bytes} bytes of text, at most {self._max_bytes} are "
                "tokenized; shorten it before sending, truncate only counts after tokenizing"
            )
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if len(token_ids) <= truncate:
            return token_ids
        prefix = self._special_prefix if add_special_tokens else []
        if len(prefix) < truncate and token_ids[: len(prefix)] == prefix:
            return [*prefix, *token_ids[len(token_ids) - truncate + len(prefix) :]]
        return token_ids[-truncate:]


class TokenTexts:
    """Decodes single tokens, each on its own, and knows which of them are special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.text_of = lru_cache(maxsize=_MAX_CACHED_TEXTS)(lambda token_id: tokenizer.decode([token_id]))
