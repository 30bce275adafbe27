"""Our client against our server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.plugin.errors import RequestError, UnavailableError
from pagedkv.plugin.requests import FinishReason, SamplingParams


def collect(target, prompt, params, **options):
    async def run():
        async with GenerationClient(target) as client:
            return [token async for token in client.generate(prompt, params, **options)]

    return asyncio.run(run())


def test_a_prompt_streams_to_its_end(served):
    tokens = collect(served.target, "w", SamplingParams(max_new_tokens=10))
    assert [token.text for token in tokens] == ["x", "y", "z", "</s>"]
    assert [token.is_special for token in tokens] == [False, False, False, True]
    assert [token.final for token in tokens[:-1]] == [None] * 3
    final = tokens[-1].final
    assert (final.text, final.num_generated_tokens, final.finish_reason) == ("xyz", 4, FinishReason.EOS_TOKEN)


def test_the_first_token_tells_how_much_of_the_prompt_was_cached(served):
    tokens = collect(served.target, "a" * 40, SamplingParams(max_new_tokens=2))
    assert [token.num_cached_tokens for token in tokens] == [32, None]


def test_parameters_reach_the_backend(served, backend):
    seen = []
    backend.before_step = lambda ids: seen.append(backend.requests[ids[0]].params)
    params = SamplingParams(
        max_new_tokens=1,
        ignore_eos=True,
        stop=("q",),
        do_sample=True,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        typical_p=0.25,
        seed=11,
        repetition_penalty=1.5,
        relative_frequency_penalty=0.5,
        watermark=True,
        top_n_tokens=2,
    )
    collect(served.target, "a", params)
    assert seen == [params]


def test_a_prompt_in_chunks_needs_patience(served, backend):
    backend.prefill_budget = 3
    tokens = collect(served.target, "abcdefgh", SamplingParams(max_new_tokens=2))
    assert [token.text for token in tokens] == ["i", "j"]


def test_a_caller_that_stops_early_ends_the_request(served, backend):
    async def run():
        async with GenerationClient(served.target) as client:
            async with aclosing(client.generate("a", SamplingParams(max_new_tokens=200, ignore_eos=True))) as tokens:
                async for token in tokens:
                    if token.text == "d":
                        break
            assert not backend.requests

    asyncio.run(run())


def test_a_cancelled_caller_ends_the_request_during_a_step(served, backend):
    async def run():
        async with GenerationClient(served.target) as client:
            started = asyncio.Event()

            async def consume():
                async for _ in client.generate("a", SamplingParams(max_new_tokens=200, ignore_eos=True)):
                    started.set()

            task = asyncio.create_task(consume())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not backend.requests

    asyncio.run(run())


def test_refusals_are_raised_as_the_server_s_errors(served):
    with pytest.raises(RequestError, match="no text"):
        collect(served.target, "", SamplingParams())


def test_nobody_at_the_address_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError):
        collect(str(tmp_path / "nobody-0"), "a", SamplingParams())


def test_a_plain_path_is_a_target_and_info_and_health_answer(served):
    async def run():
        async with GenerationClient(served.target.removeprefix("unix:")) as client:
            await client.health()
            return await client.info()

    assert asyncio.run(run()).block_size == 16
