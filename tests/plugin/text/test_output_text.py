"""A request's text: what is streamed, where it stops, and the whole at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.text import OutputText


def pushes_until_stop(tokenizer: Tokenizer, prompt: str, ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many tokens it takes to stop; None when they all pass."""
    output = OutputText(tokenizer, tokenizer.encode(prompt), stop)
    for num_tokens, token_id in enumerate(ids, 1):
        output.push(token_id)
        if output.has_stopped:
            return num_tokens
    return None


@pytest.mark.parametrize(
    ("stop", "num_tokens"),
    [
        (["c"], 3),
        (["bc"], 3),
        (["zz", "abc"], 3),
        (["abcdef", "e"], 5),
        ([""], 1),
        ([], None),
        (["."], None),
        (["ac"], None),
        (["P"], None),
        (["Pa"], None),
    ],
)
def test_stops_at_the_end_of_a_stop_string(bytes_tokenizer: Any, stop: list[str], num_tokens: int | None) -> None:
    assert pushes_until_stop(bytes_tokenizer, "P", list(b"abcdef"), stop) == num_tokens


def test_a_stop_string_may_begin_inside_a_token_but_not_end_in_one(bytes_tokenizer: Any) -> None:
    world = 256  # " wörld"
    assert pushes_until_stop(bytes_tokenizer, "", [world, ord("!")], ["ld!"]) == 2
    assert pushes_until_stop(bytes_tokenizer, "", [world, ord("!")], ["wör"]) is None


def test_a_stop_string_of_held_back_characters(bytes_tokenizer: Any) -> None:
    assert pushes_until_stop(bytes_tokenizer, "", list("a🎉b".encode()), ["🎉"]) == 5


def test_a_stop_string_that_is_the_text_of_a_special_token(bytes_tokenizer: Any) -> None:
    special = max(bytes_tokenizer.all_special_ids)
    output = OutputText(bytes_tokenizer, [65], ["b<s>"])
    assert [output.push(i) for i in (ord("b"), special)] == ["b", "<s>"]
    assert output.has_stopped
    assert output.final_text() == "b"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab", min_size=1, max_size=40), stop=st.lists(st.text("ab", max_size=4), min_size=1, max_size=3))
def test_has_stopped_is_endswith_of_all_that_was_streamed(bytes_tokenizer: Any, text: str, stop: list[str]) -> None:
    output = OutputText(bytes_tokenizer, list(b"prompt ab"), stop)
    streamed = ""
    for token_id in text.encode():
        streamed += output.push(token_id)
        assert output.has_stopped == streamed.endswith(tuple(stop))


@pytest.mark.parametrize(
    ("token_bytes", "expected"),
    [
        (b"", ""),
        ("né".encode(), "né"),
        ("né".encode()[:-1], "n"),
        ("a 🎉".encode()[:-1], "a "),
        ("🎉".encode()[:-2], ""),
        (b"a\x80b", "a�b"),
        (b"a\x80\xe4", "a"),
    ],
)
def test_final_text_ends_with_the_last_whole_character(bytes_tokenizer: Any, token_bytes: bytes, expected: str) -> None:
    output = OutputText(bytes_tokenizer, list(b"a prompt"), [])
    for token_id in token_bytes:
        output.push(token_id)
    assert output.final_text() == expected


def test_final_text_of_a_character_begun_in_the_prompt(bytes_tokenizer: Any) -> None:
    emoji = list("🎉".encode())
    output = OutputText(bytes_tokenizer, [65, *emoji[:2]], [])
    assert [output.push(i) for i in emoji[2:]] == ["", "🎉"]
    assert output.final_text() == "🎉"


def test_final_text_keeps_its_leading_space(byte_fallback_tokenizer: Any) -> None:
    prompt, *ids = byte_fallback_tokenizer.ids_of("▁Hello", "▁world")
    output = OutputText(byte_fallback_tokenizer, [0, prompt], [])
    for token_id in [*ids, 0]:
        output.push(token_id)
    assert output.final_text() == " world"


@pytest.mark.parametrize("num_missing_bytes", [0, 1, 2, 3])
def test_final_text_where_half_a_character_spoils_its_neighbours(
    byte_fallback_tokenizer: Any, num_missing_bytes: int
) -> None:
    output = OutputText(byte_fallback_tokenizer, byte_fallback_tokenizer.ids_of("▁Hello"), [])
    ids = byte_fallback_tokenizer.ids_of("▁world", "你好🎉")
    for token_id in ids[: len(ids) - num_missing_bytes]:
        output.push(token_id)
    assert output.final_text() == (" world你好" if num_missing_bytes else " world你好🎉")


def test_prompt_text_is_never_in_the_final_text(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n The answer<|im_end|>")
    num_prompt_tokens = len(demo_tokenizer.encode("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"))
    output = OutputText(demo_tokenizer, ids[:num_prompt_tokens], [])
    streamed = "".join(output.push(token_id) for token_id in ids[num_prompt_tokens:])
    assert streamed == " The answer<|im_end|>"
    assert output.final_text() == " The answer"
