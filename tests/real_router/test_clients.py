"""The clients that people use, as they come: `openai`, and `huggingface_hub`'s InferenceClient."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import InferenceClient

from .conftest import SETTINGS
from .deployment import END_TIMEOUT_S, Deployment, Launch
from .reference import Reference

openai = pytest.importorskip("openai", reason="the extra router-tests is not installed")

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def demo(launch: Launch, demo_model: Path) -> Iterator[Deployment]:
    """The demo model as the README starts it; ends by SIGTERM with code 0."""
    with launch.launcher(demo_model) as started:
        yield started
        started.program.process.send_signal(signal.SIGTERM)
        assert started.program.process.wait(END_TIMEOUT_S) == 0


@pytest.fixture
def openai_client(demo: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def list_model(client: openai.OpenAI) -> str:
    """The name that a chat UI finds and sends along."""
    return client.models.list().data[0].id


def test_openai_chats_with_the_model_as_listed(openai_client: openai.OpenAI) -> None:
    model = list_model(openai_client)
    answer = openai_client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=NUM_TOKENS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.model == model
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= NUM_TOKENS


def test_openai_streams_a_chat(openai_client: openai.OpenAI) -> None:
    chunks = openai_client.chat.completions.create(
        model=list_model(openai_client),
        messages=MESSAGES,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "Paris" in "".join(choice.delta.content or "" for choice in choices)
    assert choices[-1].finish_reason in ("length", "stop")


def test_openai_asks_for_log_probabilities(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model=list_model(openai_client), messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2]


def test_openai_completes_a_prompt(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model=list_model(openai_client), prompt="The capital of France is", max_tokens=4, temperature=0.01
    )
    assert "Paris" in answer.choices[0].text


def test_openai_is_told_that_tools_can_t_be_had(openai_client: openai.OpenAI) -> None:
    """An error to that client alone, and the next request is served."""
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.UnprocessableEntityError):
        openai_client.chat.completions.create(
            model=list_model(openai_client),
            messages=MESSAGES,
            max_tokens=NUM_TOKENS,
            tools=[tool],
            tool_choice="required",
        )
    test_openai_chats_with_the_model_as_listed(openai_client)


@pytest.fixture
def hub_client(demo: Deployment) -> InferenceClient:
    return InferenceClient(demo.url)


def test_huggingface_hub_chats(hub_client: InferenceClient) -> None:
    answer = hub_client.chat_completion(MESSAGES, max_tokens=NUM_TOKENS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    chunks = list(hub_client.chat_completion(MESSAGES, max_tokens=NUM_TOKENS, temperature=0, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content


def test_huggingface_hub_generates_text(hub_client: InferenceClient) -> None:
    prompt = "The capital of France is"
    text = hub_client.text_generation(prompt, max_new_tokens=4, return_full_text=False)
    assert "Paris" in text
    assert "".join(hub_client.text_generation(prompt, max_new_tokens=4, stream=True)) == text
    details = hub_client.text_generation(prompt, max_new_tokens=4, details=True)
    assert details.details is not None
    assert details.details.generated_tokens == 4


@pytest.mark.parametrize("num_shards", [1, 2])
def test_openai_chats_with_a_tiny_model_on_shards(
    launch: Launch, tiny_model: Path, reference: Reference, num_shards: int
) -> None:
    """Four query and two KV heads, which two shards divide."""
    with launch.launcher(tiny_model, num_shards=num_shards, settings=SETTINGS) as deployment:
        with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=list_model(client), messages=MESSAGES, max_tokens=NUM_TOKENS, temperature=0
            )
        prompt = reference.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        expected = reference.tokenizer.decode(reference.greedy(prompt, NUM_TOKENS), skip_special_tokens=True)
        assert (answer.choices[0].message.content or "").strip() == expected.strip()
        assert deployment.program.terminate() == 0
