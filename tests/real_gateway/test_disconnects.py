"""Clients that go away free what they held, whatever they asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import MODEL_NAME
from .deployment import Gateway, wait_for

openai = pytest.importorskip("openai", reason="the extra gateway-tests is not installed")

NUM_CLIENTS = 6


async def _leave(gateway: Gateway, stream: bool) -> None:
    """Asks for long answers, and leaves once the worker computes them."""

    async def ask(client: openai.AsyncOpenAI, index: int) -> None:
        answer: Any = await client.completions.create(
            model=MODEL_NAME,
            prompt=f"{index} is a number",
            max_tokens=4000,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        async for _ in answer:
            pass

    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        asks = [asyncio.create_task(ask(client, index)) for index in range(NUM_CLIENTS)]
        worker = gateway.workers[0]
        await asyncio.to_thread(
            wait_for,
            lambda: worker.metric("pagedkv_requests_running") == NUM_CLIENTS,
            "requests that run",
        )
        for task in asks:
            task.cancel()
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "not streamed"])
def test_a_client_that_leaves_frees_its_blocks(gateway: Gateway, stream: bool) -> None:
    worker = gateway.workers[0]
    worker.wait_until_idle()
    generated = worker.metric("pagedkv_generated_tokens_total")
    asyncio.run(_leave(gateway, stream))
    worker.wait_until_idle()
    assert worker.metric("pagedkv_generated_tokens_total") - generated < NUM_CLIENTS * 4000
