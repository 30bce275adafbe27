"""OpenAI's API through the real gateway, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import MODEL_NAME
from .deployment import Gateway
from .gateway_reference import GatewayReference

openai = pytest.importorskip("openai", reason="the extra gateway-tests is not installed")

NUM_TOKENS = 12
PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def greedy_text(reference: GatewayReference, prompt: str, num_tokens: int = NUM_TOKENS) -> str:
    """As the gateway tells it: a character that is incomplete at the end is left out."""
    return reference.text(reference.greedy(prompt, num_tokens))


def chat_prompt(reference: GatewayReference) -> str:
    return str(reference.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True))


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **fields)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **fields)


def text_of_stream(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_the_model_is_listed_by_its_served_name(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL_NAME]


def test_a_chat_is_transformers_answer_streamed_and_not(
    openai_client: openai.OpenAI, reference: GatewayReference
) -> None:
    expected = greedy_text(reference, chat_prompt(reference))
    answer = chat(openai_client)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "length")
    chunks = list(chat(openai_client, stream=True))
    assert text_of_stream(chunks) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


def test_completions_are_transformers_answer_streamed_and_not(
    openai_client: openai.OpenAI, reference: GatewayReference
) -> None:
    expected = greedy_text(reference, PROMPT)
    answer = complete(openai_client)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    chunks = complete(openai_client, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected


def test_usage_counts_cached_tokens_streamed_and_not(openai_client: openai.OpenAI) -> None:
    prompt = "a prompt that comes three times and fills blocks " * 8
    first, second = (complete(openai_client, prompt) for _ in range(2))
    num_prompt_tokens = first.usage.prompt_tokens
    assert num_prompt_tokens > 64
    assert first.usage.completion_tokens == NUM_TOKENS
    assert second.usage.prompt_tokens_details.cached_tokens == (num_prompt_tokens - 1) // 16 * 16
    *_, last = complete(openai_client, prompt, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens == num_prompt_tokens
    assert last.usage.completion_tokens == NUM_TOKENS
    assert last.usage.total_tokens == num_prompt_tokens + NUM_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_samples_are_seeded_one_by_one(openai_client: openai.OpenAI, stream: bool) -> None:
    def sample(seed: int, n: int) -> list[str]:
        answer = chat(openai_client, temperature=1.0, seed=seed, n=n, stream=stream)
        texts = [""] * n
        if stream:
            for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            return texts
        for choice in answer.choices:
            texts[choice.index] = choice.message.content
        return texts

    together = sample(7, 3)
    assert together == [sample(seed, 1)[0] for seed in (7, 8, 9)]
    assert len(set(together)) == 3
    assert sample(-5, 1) == sample(-5, 1)


def test_greedy_samples_are_equal_and_counted_together(openai_client: openai.OpenAI) -> None:
    answer = chat(openai_client, n=2)
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert answer.usage.completion_tokens == 2 * NUM_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_its_usage(
    openai_client: openai.OpenAI, reference: GatewayReference, stream: bool
) -> None:
    token_ids = reference.greedy(PROMPT, NUM_TOKENS)
    stop = reference.tokenizer.decode(token_ids[5:6]).strip()
    text = greedy_text(reference, PROMPT)
    assert stop in text
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = complete(openai_client, stop=[stop], **options)
    chunks = list(answer) if stream else [answer]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text[: text.index(stop)]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens <= 6


def test_a_stop_token_ends_the_answer(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    token_ids = reference.greedy(PROMPT, NUM_TOKENS)
    num_tokens = token_ids.index(token_ids[5]) + 1
    answer = complete(openai_client, extra_body={"stop_token_ids": [token_ids[5]]})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (num_tokens, "stop")


def test_log_probabilities_are_those_of_transformers(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    num_tokens = 8  # All of them whole characters: others have no entry of their own.
    entries = chat(openai_client, logprobs=True, top_logprobs=5, max_tokens=num_tokens).choices[0].logprobs.content
    scores = reference.log_probabilities(chat_prompt(reference), num_tokens)
    for entry, row in zip(entries, scores, strict=True):
        top = row.topk(5).values.tolist()
        assert entry.logprob == pytest.approx(top[0], abs=1e-3)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(top, abs=1e-3)
    penalized = chat(openai_client, logprobs=True, top_logprobs=1, frequency_penalty=2, presence_penalty=2)
    assert penalized.choices[0].logprobs.content[0].logprob == pytest.approx(entries[0].logprob, abs=1e-3)


def test_a_list_of_prompts_and_echo(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    prompts = [PROMPT, "Once upon a time"]
    answer = complete(openai_client, prompts, echo=True)
    texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {i: prompt + greedy_text(reference, prompt) for i, prompt in enumerate(prompts)}


def test_an_open_length_goes_on_to_the_end(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model=MODEL_NAME, prompt="word " * 3000, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 4096


def test_min_tokens_holds_back_the_end(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    first = reference.greedy(PROMPT, 1)[0]
    fields = {"stop_token_ids": [first], "no_stop_trim": True}
    assert complete(openai_client, extra_body=fields).usage.completion_tokens == 1
    later = complete(openai_client, extra_body={**fields, "min_tokens": 4})
    assert later.usage.completion_tokens >= 4


def test_penalties_and_filters_are_honoured(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    plain = greedy_text(reference, chat_prompt(reference), 40)
    assert chat(openai_client, max_tokens=40).choices[0].message.content == plain
    sampled = {"temperature": 1.5, "max_tokens": 40}
    for fields in ({"extra_body": {"min_p": 1.0}}, {"extra_body": {"top_k": 1}}, {"top_p": 1e-6}):
        assert chat(openai_client, **sampled, **fields).choices[0].message.content == plain
    ids = reference.penalized_greedy(chat_prompt(reference), 40, frequency=0.5, presence=1.5)
    answer = chat(openai_client, max_tokens=40, frequency_penalty=0.5, presence_penalty=1.5)
    assert answer.choices[0].message.content == reference.text(ids)


def test_responses_streamed_and_not(openai_client: openai.OpenAI, reference: GatewayReference) -> None:
    expected = greedy_text(reference, chat_prompt(reference))
    fields: Any = {"model": MODEL_NAME, "input": PROMPT, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    assert openai_client.responses.create(**fields).output_text == expected
    events = openai_client.responses.create(**fields, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def test_tools_are_offered_and_text_is_served(openai_client: openai.OpenAI) -> None:
    answer = chat(openai_client, tools=TOOLS, tool_choice="auto")
    assert answer.usage.completion_tokens == NUM_TOKENS


SCHEMA: Any = {"name": "city", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"extra_body": {"regex": "[0-9]+"}},
        {"extra_body": {"ebnf": 'root ::= "yes" | "no"'}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
    ids=["json_object", "json_schema", "regex", "grammar", "required tool", "named tool"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_constraints_are_refused_and_never_ignored(
    openai_client: openai.OpenAI, fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="constrained decoding is not supported"):
        chat(openai_client, stream=stream, **fields)


def test_what_can_not_be_served_is_the_client_s_fault(openai_client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(openai_client, "word " * 5000)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        complete(openai_client, max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="another", prompt=PROMPT)
    assert gateway.post("/v1/embeddings", {"model": MODEL_NAME, "input": PROMPT})[0] == 501
    gateway.workers[0].wait_until_idle()
