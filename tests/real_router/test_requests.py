"""Nothing that a client can send ends another's answer."""

from __future__ import annotations

import asyncio

import pytest

from .deployment import Deployment
from .reference import Reference
from .request_kinds import KINDS, RequestKind
from .request_outcomes import check_outcome, send
from .traffic import BesideStreams, Client, Reply, assert_well, run_beside_streams

PROMPTS = tuple(f"Stream {index} tells a story about the number {7 * index}:" for index in range(4))
NUM_TOKENS, MANY_TOKENS = 150, 800
NEXT_PROMPT = "And the next request"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_streams_beside_a_request_lose_no_token(
    deployment: Deployment, reference: Reference, kind: RequestKind
) -> None:
    num_tokens = MANY_TOKENS if kind.is_large else NUM_TOKENS

    async def scenario() -> tuple[BesideStreams[Reply], Reply]:
        async with Client(deployment.url) as client:
            beside = await run_beside_streams(client, PROMPTS, num_tokens, lambda: send(client, kind))
            await assert_well(client)
            return beside, await client.generate(NEXT_PROMPT, max_new_tokens=5)

    beside, following = asyncio.run(scenario())
    assert beside.num_still_running
    for stream in beside.streams:
        assert stream.error is None
        assert tuple(stream.token_ids) == reference.greedy(stream.prompt, num_tokens)
        assert stream.generated_text == stream.text
    assert tuple(following.token_ids) == reference.greedy(NEXT_PROMPT, 5)
    check_outcome(kind, beside.outcome, reference)
    deployment.wait_until_idle()
