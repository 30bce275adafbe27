"""A transformers tokenizer as pagedkv's Tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.resolved_config import ModelSettings

from .checkpoint import load_pretrained_tokenizer


class TransformersTokenizer:
    """Converts text to ids and back, exactly: decoding does not clean up spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # transformers lists only named special tokens, but decode skips every added token that is marked special
        marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.all_special_ids: Collection[int] = frozenset(marked.union(tokenizer.all_special_ids))
        self._decode = _find_decoder(tokenizer)

    @classmethod
    def load(cls, settings: ModelSettings) -> TransformersTokenizer:
        return cls(load_pretrained_tokenizer(settings))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # verbose=False: the backend raises an error for long prompts, so no warning is needed
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._decode(list(token_ids), skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders the prompt for messages of `role` and `content`, up to where the assistant's answer begins.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; send a plain prompt instead of messages")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}") from error


def _find_decoder(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """Returns a function that decodes like the tokenizer's `decode` without a clean-up of spaces.

    `decode` spends most of its time on arguments that are not used here. If it only calls the tokenizers library, that
    is called directly, because a stream decodes at every token.
    """
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and type(tokenizer).decode is PreTrainedTokenizerFast.decode
    ):
        return tokenizer.backend_tokenizer.decode
    return lambda token_ids, skip_special_tokens: str(
        tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
