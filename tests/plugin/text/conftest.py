"""Tokenizers of the three kinds there are: byte-level BPE, byte fallback, and one whose tokens are plain bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

GOLDEN = Path(__file__).parents[2] / "golden"


class HuggingFaceTokenizer:
    """A transformers tokenizer behind the protocol."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.all_special_ids = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


class BytesTokenizer:
    """Token id = place in a list of byte strings; None is a special token, which reads <s>."""

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self.tokens = list(tokens)
        self.all_special_ids = {i for i, token in enumerate(tokens) if token is None}
        self.max_decoded_tokens = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.max_decoded_tokens = max(self.max_decoded_tokens, len(token_ids))
        special = b"" if skip_special_tokens else b"<s>"
        parts = (self.tokens[i] for i in token_ids)
        return b"".join(special if part is None else part for part in parts).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(message["content"] for message in messages)


class ByteFallbackTokenizer:
    """As Llama's and Gemma's: words with a leading ▁, bytes for all else; a text's first space is dropped."""

    words = ("▁Hello", "▁world", "lo", "▁")

    def __init__(self) -> None:
        vocab = {"<s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
        vocab |= {word: 257 + i for i, word in enumerate(self.words)}
        self._tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        self._tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self._tokenizer.add_special_tokens(["<s>"])
        self.all_special_ids = {0}

    def ids_of(self, *parts: str) -> list[int]:
        """Words by name, all else by its bytes."""
        ids = []
        for part in parts:
            ids += [257 + self.words.index(part)] if part in self.words else [byte + 1 for byte in part.encode()]
        return ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(message["content"] for message in messages)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(demo_model)


@pytest.fixture
def bytes_tokenizer() -> BytesTokenizer:
    """All single bytes, some tokens of several bytes that begin and end inside characters, and a special one."""
    several = [" wörld".encode(), "né".encode()[:-1], "🎉".encode()[:2], "🎉".encode()[2:], "a你".encode(), b"\x80 ok"]
    return BytesTokenizer([*(bytes([byte]) for byte in range(256)), *several, None])


@pytest.fixture
def byte_fallback_tokenizer() -> ByteFallbackTokenizer:
    return ByteFallbackTokenizer()


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN
