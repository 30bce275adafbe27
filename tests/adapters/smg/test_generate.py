"""Generate: tokens, ends and refusals, as the gateway sees them."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from pagedkv.adapters.smg import engine_pb2 as pb

PROMPT = [5, 9, 2, 77, 31, 8]


def tokens_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    chunks = [message.chunk for message in messages if message.HasField("chunk") and message.chunk.index == index]
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def complete_of(messages: list[pb.GenerateResponse], index: int = 0) -> pb.GenerateComplete:
    (complete,) = [m.complete for m in messages if m.HasField("complete") and m.complete.index == index]
    return complete


def test_streamed_tokens_are_the_model_s_own_and_the_end_says_why(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            messages = await wire.generate(lab.ask(PROMPT, 8, ignore_eos=True))
            expected = wire.model.continue_greedily(PROMPT, 8)
            assert tokens_of(messages) == expected
            complete = complete_of(messages)
            assert messages[-1].complete == complete
            assert (complete.finish_reason, complete.completion_tokens, complete.prompt_tokens) == ("length", 8, 6)
            assert list(complete.output_ids) == []
            await wire.until_idle()

    run(play())


def test_unstreamed_answer_is_one_message_with_everything(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            (message,) = await wire.generate(lab.ask(PROMPT, 8, ignore_eos=True, stream=False))
            assert list(message.complete.output_ids) == wire.model.continue_greedily(PROMPT, 8)
            again = await wire.generate(lab.ask([*PROMPT, *range(1, 30)], 2, ignore_eos=True, request_id="s"))
            hit = await wire.generate(lab.ask([*PROMPT, *range(1, 30)], 2, ignore_eos=True, request_id="t"))
            assert (complete_of(again).cached_tokens, complete_of(hit).cached_tokens) == (0, 32)

    run(play())


def test_many_streams_at_once_get_what_each_gets_alone(lab, run) -> None:
    async def play() -> None:
        async with lab.serve(num_blocks=24) as wire:
            prompts = [[1 + (7 * i + j) % 90 for j in range(3 + 2 * i)] for i in range(12)]
            asked = [lab.ask(p, 20, ignore_eos=True, request_id=str(i)) for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*map(wire.generate, asked))
            for prompt, messages in zip(prompts, answers, strict=True):
                assert tokens_of(messages) == wire.model.continue_greedily(prompt, 20)
            await wire.until_idle()

    run(play())


@pytest.mark.parametrize("stream", [True, False])
def test_samples_share_the_prompt_and_have_neighbouring_seeds(lab, run, stream: bool) -> None:
    prompt = [1 + i % 90 for i in range(100)]

    async def play() -> None:
        async with lab.serve() as wire:
            sampled = {"temperature": 1.0, "ignore_eos": True, "stream": stream}
            several = await wire.generate(lab.ask(prompt, 6, n=3, seed=-4, **sampled))
            assert sorted(complete_of(several, i).index for i in range(3)) == [0, 1, 2]
            for index in range(3):
                alone = await wire.generate(lab.ask(prompt, 6, seed=-4 + index, request_id=f"a{index}", **sampled))
                if stream:
                    assert tokens_of(several, index) == tokens_of(alone)
                else:
                    assert complete_of(several, index).output_ids == complete_of(alone).output_ids
            assert complete_of(several, 1).cached_tokens >= 96
            greedy = await wire.generate(lab.ask(prompt, 3, n=2, ignore_eos=True, request_id="g"))
            assert tokens_of(greedy, 0) == tokens_of(greedy, 1) == wire.model.continue_greedily(prompt, 3)
            await wire.until_idle()

    run(play())


def test_stop_tokens_and_stop_strings_end_in_the_worker(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            expected = wire.model.continue_greedily(PROMPT, 30)
            position = next(i for i in range(4, 30) if expected[i] not in expected[:i])
            text = "".join(chr(32 + token_id % 95) for token_id in expected)
            by_token = await wire.generate(lab.ask(PROMPT, 30, ignore_eos=True, stop_token_ids=[expected[position]]))
            assert tokens_of(by_token) == expected[: position + 1]
            complete = complete_of(by_token)
            assert (complete.finish_reason, complete.matched_token_id) == ("stop", expected[position])
            stop = text[3:6]
            end = text.index(stop) + 3
            by_text = await wire.generate(lab.ask(PROMPT, 30, ignore_eos=True, stop=["no such", stop], request_id="s"))
            assert tokens_of(by_text) == expected[:end]
            assert (complete_of(by_text).finish_reason, complete_of(by_text).matched_stop_str) == ("stop", stop)
            late = await wire.generate(
                lab.ask(PROMPT, 30, ignore_eos=True, stop=[stop], min_tokens=end + 1, request_id="m")
            )
            assert len(tokens_of(late)) > end
            await wire.until_idle()

    run(play())


def test_eos_is_told_as_stop_and_min_tokens_keeps_it_back(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            prompt = next(
                prompt
                for prompt in ([1 + (i * j) % 96 for j in range(1, 6)] for i in range(1, 90))
                if 0 in wire.model.continue_greedily(prompt, 40)[:-1]
            )
            until = wire.model.continue_greedily(prompt, 40).index(0) + 1
            messages = await wire.generate(lab.ask(prompt, 40))
            assert tokens_of(messages)[-1] == 0
            assert len(tokens_of(messages)) == until
            complete = complete_of(messages)
            assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
            held = await wire.generate(lab.ask(prompt, 40, min_tokens=until, request_id="h"))
            assert 0 not in tokens_of(held)[:until]

    run(play())


def test_logprobs_are_the_model_s_own_and_no_more_than_asked_for(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            messages = await wire.generate(lab.ask(PROMPT, 5, ignore_eos=True, logprobs=2, repetition_penalty=1.7))
            for message in messages[:-1]:
                found = message.chunk.output_logprobs
                assert list(found.token_ids) == list(message.chunk.token_ids)
                assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.token_ids)
                assert all(len(top.values) == len(top.token_ids) == 2 for top in found.top_logprobs)
                best = [top.values[0] for top in found.top_logprobs]
                assert all(own <= top + 1e-6 for own, top in zip(found.token_logprobs, best, strict=True))
            plain = await wire.generate(lab.ask(PROMPT, 5, request_id="p"))
            assert not any(message.chunk.HasField("output_logprobs") for message in plain)

    run(play())


def test_an_open_length_is_all_that_fits(lab, run) -> None:
    async def play() -> None:
        async with lab.serve(num_blocks=8) as wire:
            messages = await wire.generate(lab.ask(PROMPT, None, ignore_eos=True))
            assert len(tokens_of(messages)) == 64 - len(PROMPT)
            assert complete_of(messages).finish_reason == "length"

    run(play())


REFUSED = {
    "json_schema": {"json_schema": "{}"},
    "regex": {"regex": "a+"},
    "grammar": {"grammar": "root ::= a"},
    "structural_tag": {"structural_tag": "{}"},
    "json_object": {"json_object": True},
    "choice": {"choice": pb.ChoiceConstraint(choices=["a"])},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 4},
    "logprobs": {"logprobs": 21},
    "temperature": {"temperature": -1.0},
    "top_p": {"top_p": 1.5, "temperature": 1.0},
    "min_p": {"min_p": 2.0, "temperature": 1.0},
    "presence_penalty": {"presence_penalty": math.nan},
    "n ": {"n": 200},
    "max_new_tokens": {"max_tokens": 2000},
    "max_tokens": {"max_tokens": 0},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_can_not_be_honoured_is_refused_before_anything_is_sent(lab, run, word: str) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("Generate", lab.ask(PROMPT, **{"max_tokens": 8, **REFUSED[word]}), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError, match=word.strip()) as caught:
                [message async for message in call]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await wire.until_idle()

    run(play())


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "hello"},
        {"tokenized": pb.TokenizedInput()},
        {"tokenized": pb.TokenizedInput(input_ids=[500])},
        {"tokenized": pb.TokenizedInput(input_ids=[1]), "mm_inputs": pb.Unsupported()},
        {"tokenized": pb.TokenizedInput(input_ids=[1]), "data_parallel_rank": 1},
        {"tokenized": pb.TokenizedInput(input_ids=[1] * 600)},
    ],
    ids=["text", "empty", "outside", "image", "rank", "long"],
)
def test_a_prompt_that_can_not_be_served_is_refused(lab, run, fields) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.generate(pb.GenerateRequest(request_id="r", **fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await wire.call("HealthCheck", pb.HealthCheckRequest())).healthy

    run(play())


def test_bytes_that_are_no_message_are_the_client_s_fault(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [message async for message in call(b"\xff\xff\xff")]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(play())


def test_too_many_requests_are_told_to_come_later(lab, run) -> None:
    async def play() -> None:
        async with lab.serve(max_live_samples=2) as wire:
            first = wire.stream("Generate", lab.ask(PROMPT, 400, ignore_eos=True), timeout=120)
            await first.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.generate(lab.ask(PROMPT, 4, n=2, request_id="x"))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert tokens_of(await wire.generate(lab.ask(PROMPT, 4, request_id="y", ignore_eos=True)))
            first.cancel()
            await wire.until_idle()

    run(play())
