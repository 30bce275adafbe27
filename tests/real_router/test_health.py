"""The router's health probes, which after an error are prompts of their own, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from .deployment import Deployment, Launch
from .probes import ShardConnections
from .reference import Reference
from .traffic import Client, Stream, assert_well

NUM_TOKENS = 200
OK = 200
REFUSED = {"grammar": {"type": "regex", "value": "[0-9"}}


@pytest.fixture
def small_pool(launch: Launch, tiny_model: Path) -> Iterator[Deployment]:
    """16 streams of 200 tokens take all blocks that the router hands out."""
    flags = ("--max-input-tokens", "1000", "--max-total-tokens", "1200")
    with launch.launcher(tiny_model, *flags, settings={"PAGEDKV_CACHE_NUM_BLOCKS": "160"}) as started:
        yield started


def test_health_is_well_again_after_errors_and_with_a_full_pool(small_pool: Deployment, reference: Reference) -> None:
    """No request of a client ends in an error, so a call past the router makes one: it clears the server's batches."""
    prompts = [f"Stream number {index}" for index in range(24)]

    async def fail_all(client: Client, shards: ShardConnections) -> None:
        streams = [Stream(prompt) for prompt in prompts[:2]]
        tasks = [asyncio.create_task(client.stream(s.prompt, into=s, max_new_tokens=NUM_TOKENS)) for s in streams]
        while not all(stream.token_ids for stream in streams):
            await asyncio.sleep(0.005)
        await shards.clear()
        await asyncio.gather(*tasks)
        assert all(stream.error for stream in streams)

    async def scenario(shards: ShardConnections) -> list[Stream]:
        async with Client(small_pool.url) as client:
            await fail_all(client, shards)
            streams = [Stream(prompt) for prompt in prompts]
            tasks = [asyncio.create_task(client.stream(s.prompt, into=s, max_new_tokens=NUM_TOKENS)) for s in streams]
            while not any(len(stream.token_ids) > 20 for stream in streams):
                await asyncio.sleep(0.005)
            probes = await asyncio.gather(*(client.health() for _ in range(20)))
            assert set(probes) == {OK}
            await asyncio.gather(*tasks)
            await fail_all(client, shards)
            await assert_well(client)
            return streams

    with ShardConnections(small_pool) as shards:
        streams = asyncio.run(scenario(shards))
    for stream in streams:
        assert stream.error is None
        assert tuple(stream.token_ids) == reference.greedy(stream.prompt, NUM_TOKENS)
    small_pool.wait_until_idle()


def test_probes_and_refused_requests_beside_streams_on_any_number_of_shards(
    deployment: Deployment, reference: Reference
) -> None:
    """Twelve streams, one after another, while probes come past the router, as it sends them after an error: to all
    shards at once, but in no order with its own calls."""

    async def probe(shards: ShardConnections, is_over: asyncio.Event) -> int:
        num_probes = 0
        while not is_over.is_set():
            await shards.probe()
            num_probes += 1
            await asyncio.sleep(0.02)
        return num_probes

    async def refuse(client: Client, is_over: asyncio.Event) -> int:
        num_refused = 0
        while not is_over.is_set():
            assert (await client.generate("Digits:", max_new_tokens=5, **REFUSED)).status == OK
            num_refused += 1
            await asyncio.sleep(0.05)
        return num_refused

    async def stream_in_turn(client: Client, name: int) -> list[Stream]:
        return [await client.stream(f"Rider {name} in round {turn}", max_new_tokens=60) for turn in range(4)]

    async def scenario(shards: ShardConnections) -> tuple[list[Stream], int, int]:
        is_over = asyncio.Event()
        async with Client(deployment.url) as client:
            background = asyncio.gather(probe(shards, is_over), refuse(client, is_over))
            rounds = await asyncio.gather(*(stream_in_turn(client, name) for name in range(12)))
            is_over.set()
            num_probes, num_refused = await background
            await assert_well(client)
            return [stream for streams in rounds for stream in streams], num_probes, num_refused

    with ShardConnections(deployment) as shards:
        streams, num_probes, num_refused = asyncio.run(scenario(shards))
    assert min(num_probes, num_refused) >= 5
    for stream in streams:
        assert stream.error is None
        assert tuple(stream.token_ids) == reference.greedy(stream.prompt, 60)
    deployment.wait_until_idle()
