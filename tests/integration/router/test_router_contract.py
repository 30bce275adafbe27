"""Hundreds of streams through the router's double and a real server, over a socket, with a device that fails now and
then: what a router takes for granted, and what the clients get."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.config import ServerSection, load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.registry import BACKENDS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings
from pagedkv.plugin.stats import BackendStats

from .double.router import Router
from .double.streams import Ending, Stream
from .double.validation import Ask, RouterFlags
from .recordings.checker import check_recording
from .token_server import EOS_ID, TOKENIZER, VOCAB_SIZE, make_paged_backend, serve_to_router

NUM_STREAMS = 240
NUM_PROMPTS = 60
PREFIX_TOKENS = 20
MAX_SHORT_OUTPUT_TOKENS = 10
LONG_OUTPUT_TOKENS = 40
"""Some blocks more than a sequence is admitted with."""
TURNS_BETWEEN_HEALTH = 16
STEPS_BETWEEN_FAULTS = 61
MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS = 63, 103

Oracle = dict[tuple[int, ...], list[int]]
"""The right LONG_OUTPUT_TOKENS tokens after each prompt of a workload."""


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
    faults = Faults()
    model = FaultyTokenModel(faults)
    keys = {
        "cache.num_blocks": num_blocks,
        "cache.overcommit": overcommit,
        "limits.max_total_tokens": MAX_TOTAL_TOKENS,
        "scheduler.max_step_tokens": 64,
        "scheduler.max_num_sequences": 16,
    }
    backend = make_paged_backend(model, keys)
    return Setup(
        backend, faults, lambda prompts: [model.continue_greedily(prompt, LONG_OUTPUT_TOKENS) for prompt in prompts]
    )


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with the ids of the character tokenizer; random weights whose best tokens are far apart."""
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
    directory = tmp_path_factory.mktemp("models") / "small-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _contiguous(model: Path) -> Setup:
    keys = {
        "backend": "contiguous",
        "model.path": str(model),
        "model.device": "cpu",
        "cache.num_blocks": 2048,
        "limits.max_total_tokens": MAX_TOTAL_TOKENS,
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
    return Setup(backend, faults, lambda prompts: _continue_all(model, prompts))


def _continue_all(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers makes of each prompt, greedily and without a cache. Rows are padded behind their end,
    where a causal model does not look."""
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    rows = torch.zeros(len(prompts), MAX_TOTAL_TOKENS, dtype=torch.int64)
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


@dataclass
class Client:
    """What one client will do, and what it got."""

    arrival_turn: int
    prompt_ids: list[int]
    ask: Ask
    leaves_after_tokens: int | None
    """When it goes away; 0 is while it still queues."""
    stream: Stream | None = None

    def go_on(self) -> None:
        """Leaves, if it is time."""
        leaves = self.leaves_after_tokens
        if self.stream is not None and leaves is not None and len(self.stream.ids) >= leaves:
            self.stream.leave()


class Workload:
    """Clients drawn from a seed: shared prefixes, all lengths, stop strings, clients that leave."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._random = random.Random(seed)
        prefixes = [self._draw_ids(PREFIX_TOKENS) for _ in range(4)]
        self._prompts = [
            [*self._random.choice(prefixes), *self._draw_ids(self._random.randint(1, MAX_INPUT_TOKENS - 20))]
            for _ in range(NUM_PROMPTS)
        ]
        self._prompts += [self._draw_ids(length) for length in (1, 2, 15, 16, 17, MAX_INPUT_TOKENS)]
        self.oracle: Oracle = dict(zip(map(tuple, self._prompts), setup.continue_all(self._prompts), strict=True))

    def draw(self, num_clients: int) -> list[Client]:
        arrival_turn = 0
        clients = []
        for _ in range(num_clients):
            arrival_turn += self._random.choice([0, 0, 0, 1, 2, 4])
            clients.append(self._draw_client(arrival_turn))
        return clients

    def _draw_ids(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]

    def _draw_client(self, arrival_turn: int) -> Client:
        prompt_ids = self._random.choice(self._prompts)
        is_long = self._random.random() < 0.4
        max_new_tokens = LONG_OUTPUT_TOKENS if is_long else self._random.randint(1, MAX_SHORT_OUTPUT_TOKENS)
        stop = ()
        if self._random.random() < 0.2:
            at = self._random.randrange(max_new_tokens)
            stop = (TOKENIZER.decode(self.oracle[tuple(prompt_ids)][at : at + 2]),)
        ask = Ask(TOKENIZER.decode(prompt_ids), max_new_tokens, stop=stop, truncate=MAX_INPUT_TOKENS)
        leaves = self._random.randint(0, max_new_tokens) if self._random.random() < 0.2 else None
        return Client(arrival_turn, prompt_ids, ask, leaves)


def _expected(oracle: Oracle, client: Client) -> tuple[list[int], int]:
    """The ids that a client is to get, alone and from a model without a cache, and why they end."""
    assert client.ask.max_new_tokens is not None
    ids = oracle[tuple(client.prompt_ids)][: client.ask.max_new_tokens]
    for num_tokens in range(1, len(ids)):
        if ids[num_tokens - 1] == EOS_ID:
            return ids[:num_tokens], pb.FINISH_REASON_EOS_TOKEN
        if client.ask.stop and TOKENIZER.decode(ids[:num_tokens]).endswith(client.ask.stop):
            return ids[:num_tokens], pb.FINISH_REASON_STOP_SEQUENCE
    return ids, pb.FINISH_REASON_LENGTH


def _has_failed_alone(client: Client) -> bool:
    """Whether a step failed for it, and not for all of its call."""
    return client.stream is not None and "The request failed: " in client.stream.text


def _check_client(oracle: Oracle, client: Client) -> None:
    stream = client.stream
    assert stream is not None
    ids, reason = _expected(oracle, client)
    if _has_failed_alone(client):
        assert stream.ids[:-1] == ids[: len(stream.ids) - 1]
        return
    assert stream.ids == ids[: len(stream.ids)]
    assert "".join(stream.texts) == TOKENIZER.decode(stream.ids)
    assert stream.ending in (Ending.FINISHED, Ending.LEFT, Ending.FAILED)
    if stream.ending is Ending.FINISHED:
        assert stream.ids == ids
        assert (stream.finish_reason, stream.text) == (reason, TOKENIZER.decode(ids, skip_special_tokens=True))


def _check_running(router: Router) -> None:
    """What an answer says of its batch must be what is known of it here."""
    for batch, entries in router.running:
        assert set(batch.request_ids) == {entry.id for entry in entries}
        assert batch.size == len(batch.request_ids)
        prompts = [entry.num_prompt_tokens for entry in entries]
        outputs = [entry.max_new_tokens for entry in entries]
        in_step = [1 if entry.stream.ids else entry.num_prompt_tokens for entry in entries]
        assert batch.current_tokens == sum(in_step)
        if router.told.info.requires_padding:
            assert batch.max_tokens == len(entries) * (max(prompts) + max(outputs))
        else:
            assert batch.max_tokens == sum(prompts) + sum(outputs)


async def _drive(router: Router, clients: list[Client]) -> None:
    """Until every client has its answer or has left."""
    waiting = sorted(clients, key=lambda client: client.arrival_turn, reverse=True)
    turn = 0
    while True:
        while waiting and waiting[-1].arrival_turn <= turn:
            client = waiting.pop()
            client.stream = router.submit(client.ask)
        for client in clients:
            client.go_on()
        turn += 1
        has_health = turn % TURNS_BETWEEN_HEALTH == 0
        # A fault may hit a health Prefill too.
        has_turn, _ = await asyncio.gather(router.turn(), router.health() if has_health else asyncio.sleep(0))
        _check_running(router)
        if not has_turn and not waiting:
            return


@dataclass(frozen=True)
class Played:
    """What a workload's run left to look at."""

    num_calls: Counter[str]
    num_failed_calls: int
    num_mixed_prefills: int
    faults: Faults
    stats: BackendStats
    num_endings: Counter[Ending]
    num_failed_alone: int


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors of a few numbers more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


async def _serve(setup: Setup, clients: list[Client], flags: RouterFlags, server_config: ServerSection) -> Router:
    async with serve_to_router(setup.backend, server_config, flags) as (router, server):
        setup.faults.is_on = True
        await _drive(router, clients)
        setup.faults.is_on = False
        assert await router.health()
        assert server.service.num_requests == 0
    return router


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Played]:
    """Runs a workload against a backend, compares every stream with the oracle, and sees that nothing is left."""

    def play(setup: Setup, seed: int, *, max_batch_prefill_tokens: int, has_chunking: bool = False) -> Played:
        workload = Workload(setup, seed)
        clients = workload.draw(NUM_STREAMS)
        flags = RouterFlags(
            MAX_INPUT_TOKENS,
            MAX_TOTAL_TOKENS,
            max_batch_prefill_tokens,
            max_batch_total_tokens=1024,
            max_batch_size=16,
            waiting_served_ratio=0.3,
        )
        server_config = ServerSection(uds_path=str(tmp_path / "tgi"), chunked_prefill=has_chunking)
        router = asyncio.run(_serve(setup, clients, flags, server_config))
        for client in clients:
            _check_client(workload.oracle, client)
        recording = router.recording()
        assert check_recording(recording).violations == []
        stats = setup.backend.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
        setup.backend.check_integrity()
        setup.backend.close()
        failed = [call for call in recording.calls if call.error is not None]
        mixed = [c for c in recording.calls if c.method == "Prefill" and c.request.HasField("cached_batch")]
        return Played(
            Counter(call.method for call in recording.calls),
            len(failed),
            len(mixed),
            setup.faults,
            stats,
            Counter(client.stream.ending for client in clients if client.stream and client.stream.ending),
            sum(map(_has_failed_alone, clients)),
        )

    return play


def _check_that_much_happened(played: Played) -> None:
    """A run in which nothing failed or left would show nothing."""
    assert played.num_endings[Ending.FINISHED] > NUM_STREAMS / 3
    assert played.num_endings[Ending.LEFT] > NUM_STREAMS / 20
    assert 2 <= played.faults.num_faults >= played.num_failed_calls
    assert played.num_endings[Ending.FAILED] + played.num_failed_alone >= played.faults.num_faults
    assert played.num_calls["FilterBatch"] > 5


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
    assert bool(played.num_mixed_prefills) == has_chunking
    assert bool(played.stats.preemptions) == (overcommit > 1)
    assert played.stats.prefix_cache_hit_tokens > 0


def test_contiguous_backend_keeps_the_router_s_contract(play, small_llama: Path) -> None:
    played = play(_contiguous(small_llama), seed=0, max_batch_prefill_tokens=256)
    _check_that_much_happened(played)
    assert played.num_mixed_prefills == 0
