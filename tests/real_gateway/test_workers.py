"""Two workers behind the real gateway: one dies, one drains, the gateway itself comes back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL_NAME, SETTINGS
from .deployment import Gateway, Launch, wait_for

openai = pytest.importorskip("openai", reason="the extra gateway-tests is not installed")

NUM_STREAMS = 16
NUM_TOKENS = 600
EACH_OTHER_FLAG = ("--policy", "round_robin")
QUICK = ("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1", "--load-monitor-interval", "1")


@pytest.fixture
def two(launch: Launch, tiny_model: Path) -> Iterator[Gateway]:
    """Two workers that take turns, of which a test may end one."""
    flags = (*QUICK, "--shutdown-grace-period-secs", "1", *EACH_OTHER_FLAG)
    with launch.deployment(tiny_model, num_workers=2, settings=SETTINGS, flags=flags) as started:
        yield started


async def _stream(client: openai.AsyncOpenAI, prompt: str, num_tokens: int) -> tuple[str, bool]:
    """The text as far as it came, and whether the stream ended well."""
    text = ""
    try:
        answer: Any = await client.completions.create(
            model=MODEL_NAME,
            prompt=prompt,
            max_tokens=num_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        finish_reason = None
        async for chunk in answer:
            for choice in chunk.choices:
                text += choice.text
                finish_reason = choice.finish_reason or finish_reason
    except openai.APIError:
        return text, False
    return text, finish_reason == "length"


def _client(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=300)


async def _stream_all(gateway: Gateway, prompts: list[str], num_tokens: int) -> list[tuple[str, bool]]:
    async with _client(gateway) as client:
        return list(await asyncio.gather(*(_stream(client, prompt, num_tokens) for prompt in prompts)))


async def _disturb(gateway: Gateway, prompts: list[str], signal_number: int) -> tuple[list[Any], list[Any]]:
    """Streams while the first worker gets a signal.

    Returns:
        Of the streams that ran, and of those that were begun after the signal.
    """
    victim = gateway.workers[0]
    async with _client(gateway) as client:
        running = [asyncio.create_task(_stream(client, prompt, NUM_TOKENS)) for prompt in prompts]
        await asyncio.to_thread(
            wait_for,
            lambda: all(worker.metric("pagedkv_requests_running") == NUM_STREAMS / 2 for worker in gateway.workers),
            "half of the streams on each worker",
        )
        victim.send(signal_number)
        late = await asyncio.gather(*(_stream(client, prompt, 8) for prompt in prompts))
        return list(await asyncio.gather(*running)), list(late)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_a_worker_that_ends_under_streams_costs_no_wrong_token(two: Gateway, signal_number: int) -> None:
    prompts = [f"{index} is a number" for index in range(NUM_STREAMS)]
    whole = [text for text, is_whole in asyncio.run(_stream_all(two, prompts, NUM_TOKENS)) if is_whole]
    early = [text for text, is_whole in asyncio.run(_stream_all(two, prompts, 8)) if is_whole]
    assert (len(whole), len(early)) == (NUM_STREAMS, NUM_STREAMS)
    running, late = asyncio.run(_disturb(two, prompts, signal_number))
    assert all(expected.startswith(text) for (text, _), expected in zip(running, whole, strict=True))
    num_whole = sum(is_whole for _, is_whole in running)
    assert late == [(text, True) for text in early]
    if signal_number == signal.SIGTERM:
        assert num_whole == NUM_STREAMS
        assert two.workers[0].wait() == 0
    else:
        assert 0 < num_whole < NUM_STREAMS
    two.workers[1].wait_until_idle()


def _ask(gateway: Gateway, prompt: str, num_tokens: int = 4) -> int:
    """Cached tokens of a greedy answer."""
    status, answer = gateway.post(
        "/v1/completions", {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    )
    assert status == 200, answer
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def _long_prompt(index: int) -> str:
    return f"conversation {index} " + "with many words in it " * 20


@pytest.fixture
def aware(launch: Launch, tiny_model: Path) -> Iterator[Gateway]:
    """Two workers, of which the one that has a prefix gets it."""
    flags = (*QUICK, "--shutdown-grace-period-secs", "1", "--policy", "cache_aware")
    with launch.deployment(tiny_model, num_workers=2, settings=SETTINGS, flags=flags) as started:
        yield started


def _known_blocks(gateway: Gateway) -> float:
    return gateway.metric("smg_kv_event_blocks_total")


def test_a_worker_that_restarts_is_known_as_it_is_now(aware: Gateway) -> None:
    """Its old position is refused, so that the gateway forgets what the process before had."""
    prompts = [_long_prompt(index) for index in range(6)]
    for prompt in prompts:
        _ask(aware, prompt)
    restarted, other = aware.workers
    wait_for(lambda: aware.metric("smg_kv_index_blocks", worker=restarted.url) > 0, "events of the worker")
    restarted.end()
    restarted.start()
    wait_for(
        lambda: aware.metric("smg_kv_event_resyncs_total", worker=restarted.url, reason="out_of_range") == 1,
        "the gateway to begin anew with the worker",
    )
    assert aware.metric("smg_kv_index_blocks", worker=restarted.url) == 0
    fresh = [_long_prompt(100 + index) for index in range(6)]
    for prompt in fresh:
        _ask(aware, prompt)
    assert all(_ask(aware, prompt) > 64 for prompt in fresh)
    assert not any(aware.metric("smg_kv_event_gaps_total", worker=one.url) for one in (restarted, other))


def test_a_gateway_that_restarts_knows_prefixes_by_the_snapshot(aware: Gateway) -> None:
    prompts = [_long_prompt(index) for index in range(10)]
    for prompt in prompts:
        _ask(aware, prompt)
    aware.end()
    aware.start()
    wait_for(lambda: _known_blocks(aware) > 0, "the snapshot of the workers")
    assert all(_ask(aware, prompt) > 64 for prompt in prompts)
