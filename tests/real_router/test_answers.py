"""Answers through the router are those of transformers alone, however they come about."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import LIMIT_FLAGS, SETTINGS
from .deployment import Deployment, Launch
from .reference import Reference
from .request_kinds import MAX_INPUT_TOKENS
from .traffic import Client, Reply, Stream, assert_well

WORDS = ("apple", "river", "stone", "cloud", "horse", "green", "seven", "moon")
NUM_DEMO_TOKENS = 24
DEMO_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a fisherman who",
    "def fibonacci(n):",
    "The three primary colours are red, yellow and",
    "Water boils at a temperature of",
    "In the year 1969 the first people walked on",
)
MAX_PIECES_TOKENS = 16384


def make_prompt(num_tokens: int, seed: int) -> str:
    """Each word is a token."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_tokens))


async def stream_all(url: str, prompts: list[str], num_tokens: int) -> list[Stream]:
    async with Client(url) as client:
        streams = await asyncio.gather(*(client.stream(prompt, max_new_tokens=num_tokens) for prompt in prompts))
        await assert_well(client)
        return streams


def assert_greedy(streams: list[Stream], reference: Reference, num_tokens: int) -> None:
    for stream in streams:
        assert stream.error is None
        assert tuple(stream.token_ids) == reference.greedy(stream.prompt, num_tokens)
        assert stream.generated_text == stream.text


def test_prompts_of_1_to_1500_tokens_at_once(deployment: Deployment, reference: Reference) -> None:
    lengths = [1 + (MAX_INPUT_TOKENS - 1) * index // 39 for index in range(40)]
    prompts = [make_prompt(length, seed=length) for length in lengths]
    assert_greedy(asyncio.run(stream_all(deployment.url, prompts, 24)), reference, 24)
    deployment.wait_until_idle()


def test_a_one_token_prompt_has_one_log_probability_of_nothing(deployment: Deployment) -> None:
    async def scenario() -> Reply:
        async with Client(deployment.url) as client:
            return await client.generate("Hello", max_new_tokens=2, decoder_input_details=True)

    prefill = asyncio.run(scenario()).body["details"]["prefill"]
    assert [(token["text"], token["logprob"]) for token in prefill] == [("Hello", None)]


def test_clients_that_go_away_leave_nothing_behind(deployment: Deployment, reference: Reference) -> None:
    """Four of ten leave half way or before the answer."""
    generator = random.Random(5)
    leaving = [generator.choice((None, None, None, 0, 10)) for _ in range(120)]

    async def scenario() -> list[Stream]:
        async with Client(deployment.url) as client:
            streams = await asyncio.gather(
                *(
                    client.stream(f"Client {index} asks", leave_after_tokens=leave_after, max_new_tokens=40)
                    for index, leave_after in enumerate(leaving)
                )
            )
            await assert_well(client)
            return streams

    for stream in asyncio.run(scenario()):
        assert stream.error is None
        expected = reference.greedy(stream.prompt, 40)
        assert tuple(stream.token_ids) == (expected[: len(stream.token_ids)] if stream.has_left else expected)
    deployment.wait_until_idle()


def test_more_admitted_than_the_cache_holds(launch: Launch, tiny_model: Path, reference: Reference) -> None:
    settings = {"PAGEDKV_CACHE_NUM_BLOCKS": "64", "PAGEDKV_CACHE_OVERCOMMIT": "3"}
    prompts = [f"Question {index}:" for index in range(96)]
    with launch.launcher(
        tiny_model, "--max-input-tokens", "400", "--max-total-tokens", "512", settings=settings
    ) as deployment:
        assert_greedy(asyncio.run(stream_all(deployment.url, prompts, 60)), reference, 60)
        assert deployment.metric("pagedkv_preemptions_total") > 0
        deployment.wait_until_idle()


@pytest.fixture(scope="module")
def long_answers(launch: Launch, tiny_model: Path) -> Iterator[Deployment]:
    settings = {**SETTINGS, "PAGEDKV_CACHE_NUM_BLOCKS": str(2 * MAX_PIECES_TOKENS // 16)}
    flags = ("--max-input-tokens", str(MAX_PIECES_TOKENS - 1), "--max-total-tokens", str(MAX_PIECES_TOKENS))
    with launch.launcher(tiny_model, *flags, settings=settings) as started:
        yield started


@pytest.mark.parametrize(("num_tokens", "num_pieces"), [(1, 1), (1024, 1), (1025, 2), (4000, 4)])
def test_long_answers_come_in_pieces(
    long_answers: Deployment, reference: Reference, num_tokens: int, num_pieces: int
) -> None:
    prompt = "Tell me a long story"
    expected = reference.pieces(prompt, num_tokens, MAX_PIECES_TOKENS)
    (stream,) = asyncio.run(stream_all(long_answers.url, [prompt], num_tokens))
    assert stream.error is None
    assert expected.num_pieces == num_pieces
    assert stream.token_ids == expected.token_ids
    assert stream.generated_text == expected.text
    long_answers.wait_until_idle()


@pytest.fixture(scope="session")
def demo_reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


def _kv_dtypes() -> list[object]:
    """Settings or flags for each KV dtype, and the least share of tokens that are transformers' likeliest ones.

    Unquantized KV gives transformers' tokens. Quantized KV changes near ties: the shares are those that KV_DTYPES.md
    has for token by token answers, less what so few tokens waver by.
    """
    least = {"fp32": 1.0, "bf16": 0.95, "fp16": 0.95, "int8": 0.93, "fp8_e4m3": 0.90, "fp8_e5m2": 0.85, "int4": 0.85}
    return [pytest.param(name, share, id=name) for name, share in least.items()]


@pytest.mark.parametrize(("kv_dtype", "least_share"), _kv_dtypes())
def test_greedy_answers_with_each_kv_dtype(
    launch: Launch, demo_model: Path, demo_reference: Reference, kv_dtype: str, least_share: float
) -> None:
    """Those of float32 weights, so that rounding is the KV's alone; each alone and all at once."""
    settings = {**SETTINGS, "PAGEDKV_MODEL_DTYPE": "float32", "PAGEDKV_CACHE_KV_DTYPE": kv_dtype}
    with launch.launcher(demo_model, *LIMIT_FLAGS, settings=settings) as deployment:
        streams = asyncio.run(stream_all(deployment.url, list(DEMO_PROMPTS), NUM_DEMO_TOKENS))
        again = asyncio.run(stream_all(deployment.url, list(DEMO_PROMPTS[:1]), NUM_DEMO_TOKENS))
        deployment.wait_until_idle()
    if kv_dtype == "fp32":
        assert_greedy(streams, demo_reference, NUM_DEMO_TOKENS)
    shares = [demo_reference.share_of_top_tokens(stream.prompt, stream.token_ids) for stream in streams]
    assert sum(shares) / len(shares) >= least_share
    assert again[0].token_ids == streams[0].token_ids
