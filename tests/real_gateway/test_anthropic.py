"""Anthropic's messages through the real gateway, with Anthropic's client."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import MODEL_NAME
from .gateway_reference import GatewayReference
from .test_openai import MESSAGES, NUM_TOKENS, chat_prompt, greedy_text

anthropic = pytest.importorskip("anthropic", reason="the extra gateway-tests is not installed")

FIELDS: Any = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_TOKENS, "extra_body": {"temperature": 0}}


def test_messages_streamed_and_not(anthropic_client: anthropic.Anthropic, reference: GatewayReference) -> None:
    expected = greedy_text(reference, chat_prompt(reference))
    answer = anthropic_client.messages.create(**FIELDS)
    assert (answer.content[0].text, answer.stop_reason) == (expected, "max_tokens")
    assert answer.usage.output_tokens == NUM_TOKENS
    with anthropic_client.messages.stream(**FIELDS) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_tokens_of_messages_are_counted(anthropic_client: anthropic.Anthropic, reference: GatewayReference) -> None:
    answer = anthropic_client.messages.count_tokens(model=MODEL_NAME, messages=MESSAGES)
    assert answer.input_tokens == len(reference.tokenizer.encode(chat_prompt(reference)))


def test_a_stop_sequence_ends_the_answer_and_is_named(
    anthropic_client: anthropic.Anthropic, reference: GatewayReference
) -> None:
    text = greedy_text(reference, chat_prompt(reference))
    stop = reference.tokenizer.decode(reference.greedy(chat_prompt(reference), NUM_TOKENS)[5:6]).strip()
    answer = anthropic_client.messages.create(**FIELDS, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)]


def test_tools_are_offered_and_text_is_served(anthropic_client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    answer = anthropic_client.messages.create(**FIELDS, tools=[tool])
    assert answer.usage.output_tokens == NUM_TOKENS
