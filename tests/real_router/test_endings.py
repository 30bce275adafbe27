"""SIGTERM: who runs is served to the end, and every program ends with code 0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from .conftest import LIMIT_FLAGS, SETTINGS
from .deployment import END_TIMEOUT_S, Launch
from .reference import Reference
from .traffic import BesideStreams, Client, Reply, Stream, run_beside_streams

PROMPTS = [f"Stream {index} runs on" for index in range(4)]
NUM_TOKENS = 300
NEW_PROMPT = "A new one"
OK, SERVICE_UNAVAILABLE = 200, 503


def assert_whole(streams: list[Stream], reference: Reference) -> None:
    for stream in streams:
        assert stream.error is None
        assert tuple(stream.token_ids) == reference.greedy(stream.prompt, NUM_TOKENS)


def run(url: str, act: Callable[[Client], Awaitable[Reply | None]]) -> BesideStreams[Reply | None]:
    """Acts beside four streams."""

    async def scenario() -> BesideStreams[Reply | None]:
        async with Client(url) as client:
            return await run_beside_streams(client, PROMPTS, NUM_TOKENS, lambda: act(client))

    return asyncio.run(scenario())


@pytest.mark.parametrize("num_shards", [1, 2])
def test_sigterm_to_the_launcher_lets_streams_end(
    launch: Launch, tiny_model: Path, reference: Reference, num_shards: int
) -> None:
    with launch.launcher(tiny_model, *LIMIT_FLAGS, num_shards=num_shards, settings=SETTINGS) as deployment:
        process = deployment.program.process

        async def ask_for_the_end(client: Client) -> None:
            process.send_signal(signal.SIGTERM)

        beside = run(deployment.url, ask_for_the_end)
        assert beside.num_still_running == len(PROMPTS)
        assert_whole(beside.streams, reference)
        assert process.wait(END_TIMEOUT_S) == 0


def test_sigterm_to_the_server_alone(launch: Launch, tiny_model: Path, reference: Reference) -> None:
    """A router that does not know of it sends one more request: that one ends alone."""
    with launch.each_by_itself(tiny_model, *LIMIT_FLAGS, settings=SETTINGS) as deployment:
        (server,) = deployment.shards
        health: list[int] = []

        async def end_the_server(client: Client) -> Reply:
            server.process.send_signal(signal.SIGTERM)
            while "draining" not in server.text():
                await asyncio.sleep(0.01)
            health.append(await client.health())
            return await client.generate(NEW_PROMPT, max_new_tokens=NUM_TOKENS)

        beside = run(deployment.url, end_the_server)
        assert beside.num_still_running == len(PROMPTS)
        assert_whole(beside.streams, reference)
        assert health == [SERVICE_UNAVAILABLE]
        reply = beside.outcome
        assert reply is not None
        assert (reply.status, reply.finish_reason, len(reply.token_ids)) == (OK, "eos_token", 1)
        assert server.process.wait(END_TIMEOUT_S) == 0


def test_a_server_that_is_killed_ends_the_launcher(launch: Launch, tiny_model: Path) -> None:
    """With two shards neither is left behind."""
    with launch.launcher(tiny_model, *LIMIT_FLAGS, num_shards=2, settings=SETTINGS) as deployment:
        shards = deployment.shard_processes()
        assert len(shards) == 2
        shards[1].kill()
        assert deployment.program.process.wait(END_TIMEOUT_S) != 0
        assert not any(shard.is_running() for shard in shards)
