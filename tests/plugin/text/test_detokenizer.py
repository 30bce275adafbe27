"""Tokens to text, one at a time."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.text import Detokenizer

function_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def push_all(tokenizer: Tokenizer, prompt_ids: list[int], token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.push(token_id) for token_id in token_ids]


def test_every_byte_of_an_emoji_a_token(bytes_tokenizer: Any) -> None:
    assert push_all(bytes_tokenizer, [65], list("🎉!".encode())) == ["", "", "", "🎉", "!"]


def test_a_token_that_ends_inside_a_character_is_held_whole(bytes_tokenizer: Any) -> None:
    n_and_half, rest_of_e = 257, 0xA9
    assert push_all(bytes_tokenizer, [65], [n_and_half, rest_of_e]) == ["", "né"]


def test_a_broken_byte_comes_out_with_the_next_token(bytes_tokenizer: Any) -> None:
    assert push_all(bytes_tokenizer, [65], [0xE4, ord("x"), 0xBD, ord("y")]) == ["", "�x", "", "�y"]


def test_a_special_token_keeps_its_text_and_ends_a_character(bytes_tokenizer: Any) -> None:
    special = max(bytes_tokenizer.all_special_ids)
    assert push_all(bytes_tokenizer, [65], [0xE4, special, 0xBD, 0xA0]) == ["", "�<s>", "", ""]


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
def test_prompt_ends_inside_the_character_that_the_first_tokens_complete(
    bytes_tokenizer: Any, num_prompt_bytes: int
) -> None:
    emoji = list("🎉".encode())
    streamed = push_all(bytes_tokenizer, [65, *emoji[:num_prompt_bytes]], [*emoji[num_prompt_bytes:], ord("x")])
    assert streamed == [""] * (3 - num_prompt_bytes) + ["🎉", "x"]


def test_prompt_ends_inside_a_character_that_is_never_completed(bytes_tokenizer: Any) -> None:
    assert push_all(bytes_tokenizer, [65, 0xE4], [ord("x"), ord("y")]) == ["x", "y"]


def test_prompt_ends_in_a_whole_replacement_character(bytes_tokenizer: Any) -> None:
    assert push_all(bytes_tokenizer, list("a�".encode()), [ord("x")]) == ["x"]


@pytest.mark.parametrize("prompt", ["", "a", "你", "🎉🎉🎉", "a rather long prompt"])
def test_nothing_of_the_prompt_is_streamed(bytes_tokenizer: Any, prompt: str) -> None:
    streamed = push_all(bytes_tokenizer, list(prompt.encode()), list("你 are".encode()))
    assert "".join(streamed) == "你 are"


def test_leading_spaces_where_a_decoder_drops_the_first(byte_fallback_tokenizer: Any) -> None:
    ids = byte_fallback_tokenizer.ids_of("▁Hello", "▁world", "lo", "▁world")
    assert push_all(byte_fallback_tokenizer, ids[:1], ids[1:]) == [" world", "lo", " world"]
    assert push_all(byte_fallback_tokenizer, [], ids) == ["Hello", " world", "lo", " world"]


def test_byte_fallback_that_spoils_whole_runs(byte_fallback_tokenizer: Any) -> None:
    """Such a decoder turns 你 followed by half a character into replacement characters all through."""
    prompt = byte_fallback_tokenizer.ids_of("▁Hello")
    ids = byte_fallback_tokenizer.ids_of("你好", "▁world", "é")
    assert push_all(byte_fallback_tokenizer, prompt, ids) == ["", "", "你", "", "", "好", " world", "", "é"]


@pytest.mark.parametrize("prompt", ["你好你好", "é你好你", "你好🎉", "🎉🎉🎉"])
def test_byte_fallback_behind_a_prompt_longer_than_the_context(byte_fallback_tokenizer: Any, prompt: str) -> None:
    ids = byte_fallback_tokenizer.ids_of("好", "▁world")
    assert push_all(byte_fallback_tokenizer, byte_fallback_tokenizer.ids_of(prompt), ids) == ["", "", "好", " world"]


@function_fixtures
@given(data=st.data())
def test_stream_is_the_decoded_whole_for_any_tokens(bytes_tokenizer: Any, data: st.DataObject) -> None:
    """Whatever the bytes: what was streamed and the whole agree, up to an end inside a character."""
    token = st.integers(0, len(bytes_tokenizer.tokens) - 1)
    character_bytes = st.text(max_size=3).map(lambda text: list(text.encode()))
    pieces = st.lists(st.one_of(token.map(lambda i: [i]), character_bytes), max_size=30)
    prompt_ids = [65, *chain.from_iterable(data.draw(pieces)), 66]  # ends in a whole character
    token_ids = list(chain.from_iterable(data.draw(pieces)))
    streamed = "".join(push_all(bytes_tokenizer, prompt_ids, token_ids))
    whole = bytes_tokenizer.decode(token_ids)
    assert whole.startswith(streamed)
    assert whole[len(streamed) :] == "" or whole.endswith("�")
    if not whole.endswith("�"):
        assert streamed == whole


@function_fixtures
@given(broken=st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xBD, 0xF0, 0x9F, 0xFF]), max_size=200))
def test_a_long_run_of_broken_bytes(bytes_tokenizer: Any, broken: list[int]) -> None:
    """It is held back to its end, none of it is lost, and no push decodes more than a small window."""
    streamed = push_all(bytes_tokenizer, [65] * 50, [*broken, ord("x")])
    assert "".join(streamed) == bytes_tokenizer.decode([*broken, ord("x")])
    assert bytes_tokenizer.max_decoded_tokens <= 32


def test_window_stays_short_over_a_long_text(bytes_tokenizer: Any) -> None:
    push_all(bytes_tokenizer, [65] * 1000, list(("你 and me 🎉 " * 200).encode()))
    assert bytes_tokenizer.max_decoded_tokens <= 16


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces , and\ttabs\n\n    def f(x):\n        return x",
    "日本語のテキスト、絵文字👩‍👩‍👧‍👦と混ぜる",
    "नमस्ते दुनिया — ça va? Ñandú ŠŽ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 2, 3, 7])
def test_any_split_of_a_text_into_prompt_and_output(
    demo_tokenizer: Tokenizer, text: str, num_prompt_tokens: int
) -> None:
    """A prompt that ends inside a character gives the whole character to the output."""
    ids = demo_tokenizer.encode(text, add_special_tokens=False)
    prompt = demo_tokenizer.decode(ids[:num_prompt_tokens]).rstrip("�")
    assert prompt + "".join(push_all(demo_tokenizer, ids[:num_prompt_tokens], ids[num_prompt_tokens:])) == text
