"""What the real router did to this server once, row by row: most of these ended everybody's answers, the service, or
the router's start."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.plugin.config import ServerSection, load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.registry import BACKENDS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings

from .double.router import Router
from .double.streams import Ending, Stream
from .double.validation import Ask, RouterFlags
from .recordings.checker import check_recording
from .token_server import EOS_ID, FIRST_CHARACTER, TOKENIZER, VOCAB_SIZE, make_paged_backend, serve_to_router

NUM_STREAMS = 6
NUM_TOKENS = 30
POOL = {"cache.num_blocks": 64, "limits.max_total_tokens": 256}
FLAGS = RouterFlags(max_batch_prefill_tokens=128)


def _text(seed: int, num_tokens: int = 12) -> str:
    """A prompt whose answer does not end early."""
    model = TokenModel(VOCAB_SIZE)
    for offset in range(1000):
        ids = [(seed * 31 + offset * 7 + i * i) % (VOCAB_SIZE - 1) + 1 for i in range(num_tokens)]
        if EOS_ID not in model.continue_greedily(ids, NUM_TOKENS):
            return TOKENIZER.decode(ids)
    raise AssertionError("every answer ends early")


def _right_ids(stream: Stream, num_tokens: int = NUM_TOKENS) -> list[int]:
    return TokenModel(VOCAB_SIZE).continue_greedily(TOKENIZER.encode(stream.ask.inputs), num_tokens)


Scene = Callable[[Router, Any], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Plays a scene with a router in front of a server; afterwards all is well, and nothing is left."""

    def play(
        scene: Scene,
        keys: dict[str, object] = POOL,
        flags: RouterFlags = FLAGS,
        model: TokenModel = TokenModel(VOCAB_SIZE),  # noqa: B008 - never changes
    ) -> None:
        backend = make_paged_backend(model, keys)
        config = ServerSection(uds_path=str(tmp_path / "tgi"))
        asyncio.run(_play(scene, backend, config, flags))
        stats = backend.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        backend.check_integrity()
        backend.close()

    return play


async def _play(scene: Scene, backend: Backend, config: ServerSection, flags: RouterFlags) -> None:
    async with serve_to_router(backend, config, flags) as (router, server):
        await scene(router, server)
        assert server.service.num_requests == 0
        violations = check_recording(router.recording()).violations
        assert [violation for violation in violations if violation.rule != "probe-after-failure"] == []


async def _start_streams(router: Router) -> list[Stream]:
    """Some that run, a few tokens in."""
    streams = [router.submit(Ask(_text(index), max_new_tokens=NUM_TOKENS)) for index in range(NUM_STREAMS)]
    for _ in range(4):
        await router.turn()
    assert all(stream.ids for stream in streams)
    return streams


def _check_whole(streams: list[Stream]) -> None:
    for stream in streams:
        assert stream.ending is Ending.FINISHED, stream.error
        assert stream.ids == _right_ids(stream)


async def _finish(router: Router, streams: list[Stream]) -> None:
    """The streams lose nothing, no call has failed, health is well, and the next request is served."""
    await router.run()
    _check_whole(streams)
    assert [call.error for call in router.shards.calls if call.error] == []
    assert await router.health()
    after = router.submit(Ask(_text(99), max_new_tokens=NUM_TOKENS))
    await router.run()
    _check_whole([after])


PASSED_OVER = {
    "model": Ask(_text(50), NUM_TOKENS, model="as /v1/models lists it"),
    "truncate": Ask(_text(51) * 80_000, 8, truncate=100),
}
TAKEN_SOMEHOW = {
    "temperature": Ask(_text(52), 8, temperature=1e39, do_sample=True),
    "repetition_penalty": Ask(_text(53), 8, repetition_penalty=1e39),
    "regex": Ask(_text(54), 8, regex="[0-9]{3}"),
    "schema": Ask(_text(55), 8, regex=r'\{[ ]?"name"[ ]?:[ ]?"[^"]*"[ ]?\}', model="tgi"),
    "invalid regex": Ask(_text(56), 8, regex="[0-9"),
}


@pytest.mark.parametrize("kind", [*PASSED_OVER, *TAKEN_SOMEHOW])
def test_a_request_beside_streams_ends_nobody_else_s(play, kind: str) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = await _start_streams(router)
        odd = router.submit({**PASSED_OVER, **TAKEN_SOMEHOW}[kind])
        await _finish(router, streams)
        assert odd.ending is Ending.FINISHED
        if kind == "model":
            assert odd.ids == _right_ids(odd)
        if kind == "truncate":
            kept = TOKENIZER.encode(odd.ask.inputs)[-100:]
            assert odd.ids == TokenModel(VOCAB_SIZE).continue_greedily(kept, len(odd.ids))

    play(scene)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_one_token_prompt_has_one_log_probability_which_is_no_number(play, is_alone: bool) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = await _start_streams(router)
        one = router.submit(Ask(chr(FIRST_CHARACTER + 5), 1, decoder_input_details=True))
        many = None if is_alone else router.submit(Ask(_text(60), 1, decoder_input_details=True))
        await _finish(router, streams)
        assert [id_ for id_, _, _ in one.prefill] == [5]
        assert math.isnan(one.prefill[0][1])
        if many is not None:
            assert [id_ for id_, _, _ in many.prefill] == TOKENIZER.encode(many.ask.inputs)
            assert [math.isnan(logprob) for _, logprob, _ in many.prefill] == [True] + [False] * 11

    play(scene)


def test_a_request_of_all_that_was_told_runs_in_a_pool_of_no_more(play) -> None:
    """Block 0 is kept back: of 16 blocks the router hands out 15."""

    async def scene(router: Router, server: Any) -> None:
        told = router.told
        num_tokens = told.max_total_tokens - 12
        big = router.submit(Ask(_text(1), num_tokens))
        behind = router.submit(Ask(_text(2), 4))
        await router.run()
        assert [big.ending, behind.ending] == [Ending.FINISHED] * 2
        assert big.ids == _right_ids(big, num_tokens)[: len(big.ids)]
        long = router.submit(Ask(_text(3, told.max_input_tokens), told.max_total_tokens - told.max_input_tokens))
        await router.run()
        assert long.ending is Ending.FINISHED

    play(scene, {"cache.num_blocks": 16})


@pytest.mark.parametrize("num_blocks", [16, 64])
def test_a_pool_smaller_than_the_model_s_positions_starts_a_router_without_flags(play, num_blocks: int) -> None:
    """Lengths that the server tells of itself satisfy the router, whose largest step is larger than any of these pools
    unless it is told so."""

    async def scene(router: Router, server: Any) -> None:
        assert router.told.max_input_tokens < router.told.max_total_tokens

    flags = RouterFlags(max_batch_prefill_tokens=num_blocks * 16)
    play(scene, {"cache.num_blocks": num_blocks}, flags)


def test_switch_to_the_contiguous_backend_starts_a_router_with_its_defaults(tmp_path: Path) -> None:
    """A model of 8192 positions, and a step of 4096 prompt tokens without chunks."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    ids = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, **ids)).save_pretrained(tmp_path / "model")
    keys = {"backend": "contiguous", "model.path": str(tmp_path / "model"), "model.device": "cpu"}
    written = load_config(None, keys, {})
    spec = load_plugin(MODELS, "transformers").describe(resolve_model_settings(written))
    backend = load_plugin(BACKENDS, "contiguous").create(resolve_config(written, spec))

    async def scene(router: Router, server: Any) -> None:
        assert router.told.max_input_tokens <= 4096
        stream = router.submit(Ask(_text(1), 4))
        await router.run()
        assert stream.ending is Ending.FINISHED

    asyncio.run(_play(scene, backend, ServerSection(uds_path=str(tmp_path / "tgi")), RouterFlags()))
    backend.close()


def test_health_comes_back_after_a_full_house_a_probe_and_a_later_error(play) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = await _start_streams(router)
        for _ in range(2):
            router.doubt_health()
            _, *are_well = await asyncio.gather(router.turn(), router.health(), router.health())
            assert all(are_well)
        router.doubt_health()
        assert await router.health(), "with nothing of the loop beside it"
        await _finish(router, streams)

    play(scene, {**POOL, "scheduler.max_num_sequences": NUM_STREAMS})


def test_drain_lets_streams_finish_and_ends_a_new_request_alone(play) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = await _start_streams(router)
        drain = asyncio.create_task(server.drain(20))
        await asyncio.sleep(0)
        late = router.submit(Ask(_text(70), 4))
        assert not await router.health()
        await router.run()
        _check_whole(streams)
        assert late.ending is Ending.FINISHED
        await drain

    play(scene)


def test_forty_prompts_of_all_lengths_at_once_are_answered_as_alone(play) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = [router.submit(Ask(_text(index, 1 + index * 5), NUM_TOKENS)) for index in range(40)]
        await _finish(router, streams)

    play(scene, {"cache.num_blocks": 128, "limits.max_total_tokens": 256})


def test_answers_are_whole_where_the_router_is_told_three_times_the_cache(play) -> None:
    async def scene(router: Router, server: Any) -> None:
        streams = [router.submit(Ask(_text(index), NUM_TOKENS)) for index in range(96)]
        await _finish(router, streams)
        assert server.service.num_requests == 0

    play(scene, {"cache.num_blocks": 32, "cache.overcommit": 3, "limits.max_total_tokens": 256})


class EndlessTokenModel(TokenModel):
    """Never says that an answer ends."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.spec = replace(self.spec, eos_token_ids=())


@pytest.mark.parametrize(("num_asked", "num_pieces"), [(1, 1), (1024, 1), (1025, 2)])
def test_an_answer_of_more_than_a_piece_comes_as_several_requests(play, num_asked: int, num_pieces: int) -> None:
    """The rest of it is asked for as a whole piece."""

    async def scene(router: Router, server: Any) -> None:
        stream = router.submit(Ask(_text(4), num_asked))
        right: list[int] = []
        for _ in range(num_pieces):
            text = stream.ask.inputs + TOKENIZER.decode(right, skip_special_tokens=True)
            right += TokenModel(VOCAB_SIZE).continue_greedily(TOKENIZER.encode(text), min(num_asked, 1024))
        await router.run()
        assert (stream.ending, stream.num_pieces) == (Ending.FINISHED, num_pieces)
        assert stream.ids == right

    keys = {"cache.num_blocks": 256, "limits.max_total_tokens": 4096}
    play(scene, keys, RouterFlags(), model=EndlessTokenModel())
