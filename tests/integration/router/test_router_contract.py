"""Hundreds of streams through a router and a real server, over a socket: what a router takes for granted, and what the
clients get."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import ServerSection, load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.registry import BACKENDS, KERNELS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings
from pagedkv.plugin.stats import BackendStats

VOCAB_SIZE = 97
EOS_ID = 0
FIRST_CHARACTER = 0x100
NUM_STREAMS = 300
NUM_PROMPTS = 60
PREFIX_TOKENS = 20
MAX_SHORT_OUTPUT_TOKENS = 10
LONG_OUTPUT_TOKENS = 40
"""Some blocks more than a sequence is admitted with."""
STEPS_BETWEEN_FAULTS = 61
LIMITS = {"max_input_tokens": 63, "max_total_tokens": 103}

Oracle = dict[tuple[int, ...], list[int]]
"""The right LONG_OUTPUT_TOKENS tokens after each prompt of a workload."""


class CharacterTokenizer:
    """Each id is one character, so that text and ids say the same."""

    all_special_ids = (EOS_ID,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - FIRST_CHARACTER for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(token_id + FIRST_CHARACTER) for token_id in token_ids if token_id != EOS_ID or not skip_special_tokens
        )

    def apply_chat_template(self, messages: Sequence[Any]) -> str:
        raise NotImplementedError


TOKENIZER = CharacterTokenizer()


class Faults:
    """Fails every so many steps, as a device that runs out of memory would."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_faults = 0
        self.is_on = False

    def before_step(self) -> None:
        self.num_steps += self.is_on
        if self.is_on and self.num_steps % STEPS_BETWEEN_FAULTS == 0:
            self.num_faults += 1
            raise RuntimeError("the device ran out of memory, says the test")


class FaultyTokenModel(TokenModel):
    """The token model, which fails now and then."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(VOCAB_SIZE)
        self._faults = faults

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        self._faults.before_step()
        return super().forward(batch, attention)


@dataclass(frozen=True)
class Setup:
    backend: Backend
    faults: Faults
    continue_all: Callable[[list[list[int]]], list[list[int]]]
    """The right LONG_OUTPUT_TOKENS tokens after each prompt, without any cache of ours."""


def _paged(num_blocks: int, overcommit: int) -> Setup:
    keys = {
        "model.path": "none",
        "cache.num_blocks": num_blocks,
        "cache.overcommit": overcommit,
        "limits.max_total_tokens": LIMITS["max_total_tokens"],
        "scheduler.max_step_tokens": 64,
        "scheduler.max_num_sequences": 16,
    }
    faults = Faults()
    model = FaultyTokenModel(faults)
    config = resolve_config(load_config(None, keys, {}), model.spec)
    backend = PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))
    return Setup(
        backend, faults, lambda prompts: [model.continue_greedily(prompt, LONG_OUTPUT_TOKENS) for prompt in prompts]
    )


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 query and 2 KV heads, float32, random weights whose best tokens are far apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        initializer_range=0.5,
    )
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _contiguous(model: Path) -> Setup:
    keys = {
        "backend": "contiguous",
        "model.path": str(model),
        "model.device": "cpu",
        "cache.num_blocks": 2048,
        "limits.max_total_tokens": LIMITS["max_total_tokens"],
        "scheduler.max_num_sequences": 16,
    }
    written = load_config(None, keys, {})
    spec = load_plugin(MODELS, "transformers").describe(resolve_model_settings(written))
    backend = load_plugin(BACKENDS, "contiguous").create(resolve_config(written, spec))
    faults = Faults()
    forward = backend._model.forward

    def faulty_forward(*args: Any, **keys: Any) -> torch.Tensor:
        faults.before_step()
        return forward(*args, **keys)

    backend._model.forward = faulty_forward
    return Setup(backend, faults, partial(_continue_all, model))


def _continue_all(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers makes of each prompt, greedily and without a cache. Rows are padded behind their end,
    where a causal model does not look."""
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    rows = torch.zeros(len(prompts), LIMITS["max_total_tokens"], dtype=torch.int64)
    for row, prompt_ids in zip(rows, prompts, strict=True):
        row[: len(prompt_ids)] = torch.tensor(prompt_ids)
    lengths = torch.tensor([len(prompt_ids) for prompt_ids in prompts])
    row_indices = torch.arange(len(prompts))
    with torch.inference_mode():
        for num_tokens in range(LONG_OUTPUT_TOKENS):
            ends = lengths + num_tokens
            logits = model(rows[:, : int(ends.max())], use_cache=False).logits
            rows[row_indices, ends] = logits[row_indices, ends - 1].argmax(-1)
    return [rows[i, length : length + LONG_OUTPUT_TOKENS].tolist() for i, length in enumerate(lengths)]


class Workload:
    """Streams drawn from a seed: shared prefixes, all lengths, stop strings, clients that leave, faulty requests."""

    def __init__(self, make_stream: Callable[..., Any], setup: Setup, seed: int) -> None:
        self._make_stream = make_stream
        self._random = random.Random(seed)
        prefixes = [self._draw_ids(PREFIX_TOKENS) for _ in range(4)]
        self._prompts = [
            [*self._random.choice(prefixes), *self._draw_ids(self._random.randint(1, LIMITS["max_input_tokens"] - 20))]
            for _ in range(NUM_PROMPTS)
        ]
        self._prompts += [self._draw_ids(length) for length in (1, 2, 15, 16, 17, LIMITS["max_input_tokens"])]
        self.oracle: Oracle = dict(zip(map(tuple, self._prompts), setup.continue_all(self._prompts), strict=True))

    def draw(self, num_streams: int) -> list[Any]:
        arrival_calls = 0
        streams = []
        for _ in range(num_streams):
            arrival_calls += self._random.choice([0, 0, 0, 1, 2, 4])
            streams.append(self._draw_stream(arrival_calls))
        return streams

    def _draw_ids(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]

    def _draw_stream(self, arrival_calls: int) -> Any:
        prompt_ids = self._random.choice(self._prompts)
        is_long = self._random.random() < 0.15
        max_new_tokens = LONG_OUTPUT_TOKENS if is_long else self._random.randint(1, MAX_SHORT_OUTPUT_TOKENS)
        stopping = pb.StoppingCriteriaParameters(
            max_new_tokens=max_new_tokens, ignore_eos_token=self._random.random() < 0.5
        )
        if self._random.random() < 0.2:
            at = self._random.randrange(max_new_tokens)
            stopping.stop_sequences.append(TOKENIZER.decode(self.oracle[tuple(prompt_ids)][at : at + 2]))
        text = TOKENIZER.decode(prompt_ids)
        message = pb.Request(
            inputs=text,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
            truncate=LIMITS["max_input_tokens"],
            parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
            stopping_parameters=stopping,
            add_special_tokens=True,
        )
        if self._random.random() < 0.01:
            message.adapter_id = "one that is not there"
        leaves = self._random.randint(0, max_new_tokens) if self._random.random() < 0.2 else None
        return self._make_stream(arrival_calls, prompt_ids, message, leaves)


def _expected(oracle: Oracle, stream: Any) -> tuple[list[int], int]:
    """The ids that a stream is to get, alone and from a model without a cache, and why it ends."""
    stopping = stream.message.stopping_parameters
    ids = oracle[tuple(stream.prompt_ids)][: stopping.max_new_tokens]
    for num_tokens in range(1, len(ids)):
        if ids[num_tokens - 1] == EOS_ID and not stopping.ignore_eos_token:
            return ids[:num_tokens], pb.FINISH_REASON_EOS_TOKEN
        if TOKENIZER.decode(ids[:num_tokens]).endswith(tuple(stopping.stop_sequences)):
            return ids[:num_tokens], pb.FINISH_REASON_STOP_SEQUENCE
    return ids, pb.FINISH_REASON_LENGTH


def _check_stream(oracle: Oracle, stream: Any) -> None:
    ids, reason = _expected(oracle, stream)
    assert stream.ids == ids[: len(stream.ids)]
    assert "".join(stream.texts) == TOKENIZER.decode(stream.ids)
    if stream.final is not None:
        assert stream.ids == ids
        assert stream.final.finish_reason == reason
        assert stream.final.generated_tokens == len(ids)
        assert stream.final.text == TOKENIZER.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Played:
    """What a workload's run left to look at."""

    router: Any
    faults: Faults
    stats: BackendStats
    num_endings: Counter[str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors of a few numbers more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def play(router_parts: SimpleNamespace, tmp_path: Path) -> Callable[..., Played]:
    """Runs a workload against a backend, compares every stream with the oracle, and sees that nothing is left."""

    async def serve(setup: Setup, streams: list[Any], limits: Any, server_config: ServerSection) -> Any:
        async with (
            GenerationServer(setup.backend, TOKENIZER, server_config) as server,
            grpc.aio.insecure_channel(server.targets[0]) as channel,
        ):
            router = router_parts.Router(channel, limits, streams)
            await router.start()
            setup.faults.is_on = True
            await router.run()
            assert server.service.num_requests == 0
        return router

    def play(setup: Setup, seed: int, *, max_batch_prefill_tokens: int, has_chunking: bool = False) -> Played:
        workload = Workload(router_parts.Stream, setup, seed)
        streams = workload.draw(NUM_STREAMS)
        limits = router_parts.RouterLimits(
            **LIMITS,
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_total_tokens=1024,
            max_batch_size=16,
        )
        server_config = ServerSection(uds_path=str(tmp_path / "tgi"), chunked_prefill=has_chunking)
        router = asyncio.run(serve(setup, streams, limits, server_config))
        for stream in streams:
            _check_stream(workload.oracle, stream)
        stats = setup.backend.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        setup.backend.check_integrity()
        setup.backend.close()
        return Played(router, setup.faults, stats, Counter(stream.ending.value for stream in streams))

    return play


def _check_that_much_happened(played: Played) -> None:
    """A run in which nothing failed or left would show nothing."""
    assert played.num_endings["finished"] > NUM_STREAMS / 2
    assert played.num_endings["left"] > NUM_STREAMS / 20
    failed_calls = played.router.failed_calls
    assert failed_calls["INTERNAL"] == played.faults.num_faults >= 2
    assert failed_calls["INVALID_ARGUMENT"] == failed_calls.total() - played.faults.num_faults >= 1
    assert played.num_endings["failed"] > failed_calls.total()
    assert played.router.num_filtered > 5


@pytest.mark.parametrize("overcommit", [1, 4])
@pytest.mark.parametrize("has_chunking", [False, True], ids=["new batches alone", "chunked"])
def test_paged_backend_keeps_the_router_s_contract(play, has_chunking: bool, overcommit: int) -> None:
    """With overcommit the router admits four times what there is room for: the server preempts, and no one notices."""
    played = play(
        _paged(num_blocks=14, overcommit=overcommit),
        seed=overcommit,
        has_chunking=has_chunking,
        max_batch_prefill_tokens=32 if has_chunking else 128,
    )
    _check_that_much_happened(played)
    assert bool(played.router.num_mixed_prefills) == has_chunking
    assert bool(played.stats.preemptions) == (overcommit > 1)
    assert played.stats.prefix_cache_hit_tokens > 0


def test_contiguous_backend_keeps_the_router_s_contract(play, tiny_llama: Path) -> None:
    played = play(_contiguous(tiny_llama), seed=0, max_batch_prefill_tokens=256)
    _check_that_much_happened(played)
    assert played.router.num_mixed_prefills == 0
