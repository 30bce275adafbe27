"""The contiguous backend: equal to transformers' own generate, and honest about what it reserves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.adapters.transformers.contiguous_backend import ContiguousBackend
from pagedkv.adapters.transformers.contiguous_batch import PaddedInput
from pagedkv.adapters.transformers.contiguous_cache import ReservedCache
from pagedkv.adapters.transformers.contiguous_warmup import measure_largest_batch, run_full_decode
from pagedkv.plugin.errors import (
    CapacityError,
    DuplicateRequestError,
    RequestError,
    StepError,
    UnavailableError,
    UnsupportedError,
)
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.registry import BACKENDS, load_plugin
from pagedkv.plugin.requests import FinishReason, Request, RequestId, SamplingParams, StepOutput
from pagedkv.plugin.resolved_config import ResolvedConfig

NAMES = ["llama", "gpt2", "mistral"]
LIMITS = WarmupLimits(max_input_tokens=60, max_total_tokens=100, max_prefill_tokens=400)

TinyModel = Callable[[str], Path]
Resolve = Callable[..., ResolvedConfig]
MakeBackend = Callable[..., ContiguousBackend]


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_request(id_: int, prompt_ids: Sequence[int], max_new_tokens: int = 8, **params: Any) -> Request:
    return Request(RequestId(id_), prompt_ids, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **params))


def collect(outputs: Sequence[StepOutput], into: dict[int, list[int]]) -> None:
    for output in outputs:
        into.setdefault(output.request_id, []).append(output.token.token_id)


def run_to_end(backend: ContiguousBackend) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while backend.has_unfinished():
        collect(backend.step(), tokens)
        backend.check_integrity()
    return tokens


@pytest.fixture(scope="session")
def make_backend(tiny_model: TinyModel, resolved: Resolve) -> Iterator[MakeBackend]:
    """A warmed-up backend of a tiny model; made once for each choice and handed out idle."""
    made: dict[str, ContiguousBackend] = {}

    def make(name: str = "llama", limits: WarmupLimits = LIMITS, **sections: Any) -> ContiguousBackend:
        key = repr((name, sections))
        if key not in made:
            sections.setdefault("cache", {"num_blocks": 200})
            made[key] = ContiguousBackend.create(resolved(tiny_model(name), **sections))
        backend = made[key]
        backend.abort(backend._live_ids())
        backend.warmup(limits)
        return backend

    yield make
    for backend in made.values():
        backend.close()


@pytest.fixture(scope="session")
def generate(tiny_model: TinyModel) -> Callable[..., list[int]]:
    """Greedy tokens by transformers' own generate, one prompt alone."""
    models: dict[str, Any] = {}

    def run(name: str, prompt_ids: Sequence[int], max_new_tokens: int = 8) -> list[int]:
        if name not in models:
            models[name] = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
        prompt = torch.tensor([prompt_ids])
        output = models[name].generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return output[0, len(prompt_ids) :].tolist()

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_left_padded_batch_gives_the_tokens_of_generate(
    name: str, make_backend: MakeBackend, generate: Callable[..., list[int]]
) -> None:
    """Lengths 1 to 40: the shortest row is nearly all padding, and windows are shorter than rows."""
    backend = make_backend(name)
    prompts = {id_: random_tokens(length, id_) for id_, length in enumerate((1, 40, 7, 13, 2))}
    backend.add([make_request(id_, prompt, 6 + id_) for id_, prompt in prompts.items()])
    tokens = run_to_end(backend)
    assert tokens == {id_: generate(name, prompt, 6 + id_) for id_, prompt in prompts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_join_and_leave_do_not_disturb_each_other(
    name: str, make_backend: MakeBackend, generate: Callable[..., list[int]]
) -> None:
    """The router's order: prefill alone, decode, a second prefill, joined decode, one row dropped, decode on."""
    backend = make_backend(name)
    prompts = {1: random_tokens(5, 1), 2: random_tokens(30, 2), 3: random_tokens(50, 3), 4: random_tokens(2, 4)}
    tokens: dict[int, list[int]] = {}

    def step(ids: Collection[int]) -> None:
        collect(backend.step([RequestId(id_) for id_ in ids]), tokens)
        backend.check_integrity()

    backend.add([make_request(id_, prompts[id_], 20) for id_ in (1, 2)])
    step([1, 2])
    step([1, 2])
    backend.add([make_request(id_, prompts[id_], 20) for id_ in (3, 4)])
    step([3, 4])
    assert {id_: len(found) for id_, found in tokens.items()} == {1: 2, 2: 2, 3: 1, 4: 1}
    step([1, 2, 3, 4])
    backend.abort([RequestId(3)])
    backend.check_integrity()
    while backend.has_unfinished():
        step([1, 2, 4])
    assert tokens.pop(3) == generate(name, prompts[3], 2)
    assert tokens == {id_: generate(name, prompts[id_], 20) for id_ in (1, 2, 4)}


def test_part_of_a_batch_can_be_stepped_alone(make_backend: MakeBackend, generate: Callable[..., list[int]]) -> None:
    backend = make_backend()
    prompts = {id_: random_tokens(4 + 9 * id_, id_) for id_ in range(3)}
    backend.add([make_request(id_, prompt) for id_, prompt in prompts.items()])
    tokens: dict[int, list[int]] = {}
    collect(backend.step(), tokens)
    for ids in ([0], [2, 0], [1], [99]):
        outputs = backend.step([RequestId(id_) for id_ in ids])
        assert [output.request_id for output in outputs] == sorted(set(ids) & {0, 1, 2})
        collect(outputs, tokens)
        backend.check_integrity()
    for id_, found in run_to_end(backend).items():
        tokens[id_] += found
    assert tokens == {id_: generate("llama", prompt) for id_, prompt in prompts.items()}


@given(st.lists(st.sampled_from(["add", "step", "step some", "abort"]), max_size=14), st.randoms(use_true_random=False))
def test_any_order_of_calls_leaves_every_request_its_own_tokens(
    make_backend: MakeBackend, generate: Callable[..., list[int]], calls: list[str], random: Any
) -> None:
    backend = make_backend()
    prompts: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    for call in calls:
        some = [RequestId(id_) for id_ in prompts if random.random() < 0.5]
        if call == "add":
            for id_ in range(len(prompts), len(prompts) + random.randint(1, 3)):
                prompts[id_] = random_tokens(random.randint(1, 30), random.randint(0, 5))
                backend.add([make_request(id_, prompts[id_], 5)])
        elif call == "abort":
            backend.abort(some)
        else:
            collect(backend.step(None if call == "step" else some), tokens)
        backend.check_integrity()
    for id_, found in run_to_end(backend).items():
        tokens[id_] = tokens.get(id_, []) + found
    for id_, found in tokens.items():
        assert found == generate("llama", prompts[id_], 5)[: len(found)]
    assert backend.stats().kv_bytes_reserved == 0


def test_the_demo_model_generates_as_transformers_does(demo_model: Path, resolved: Resolve) -> None:
    backend = ContiguousBackend.create(resolved(demo_model, cache={"num_blocks": 64}))
    backend.warmup(WarmupLimits(max_total_tokens=128))
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    texts = ["def fibonacci(n):\n    ", "Once"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    backend.add([make_request(id_, prompt, 6) for id_, prompt in enumerate(prompts)])
    tokens = run_to_end(backend)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for id_, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert tokens[id_] == expected[0, len(prompt) :].tolist()
    backend.close()


def test_each_request_reserves_room_for_the_longest_answer(make_backend: MakeBackend) -> None:
    """Requests of mean length 200 of 2048, scaled: at least 80 % of what is reserved stays unused."""
    backend = make_backend()
    bytes_per_token = 3 * 2 * (8 + 8) * 4  # layers × KV heads × (key and value dims) × float32
    backend.add([make_request(id_, random_tokens(9, id_), 3) for id_ in range(4)])
    assert backend.stats().kv_bytes_reserved == 0
    backend.step()
    stats = backend.stats()
    assert stats.kv_bytes_reserved == 4 * 100 * bytes_per_token
    assert stats.kv_bytes_in_use == 4 * 9 * bytes_per_token
    assert stats.kv_bytes_total == 200 * 16 * bytes_per_token
    assert stats.fragmentation == pytest.approx(0.91)
    assert (stats.running, stats.waiting, stats.num_used_blocks, stats.num_free_blocks) == (4, 0, 400, 2800)
    held_bytes = sum(
        room.nbytes for batch in backend._batches for layer in batch.cache.layers for room in layer._rooms or ()
    )
    assert held_bytes == stats.kv_bytes_reserved
    run_to_end(backend)
    assert backend.stats().kv_bytes_reserved == 0


def test_requests_beyond_the_reserved_room_wait_their_turn(
    make_backend: MakeBackend, generate: Callable[..., list[int]]
) -> None:
    """A budget of 8 × the longest total holds 8 requests, however short they are."""
    backend = make_backend(cache={"num_blocks": 50}, limits=LIMITS)
    prompts = {id_: random_tokens(3 + id_, id_) for id_ in range(20)}
    backend.add([make_request(id_, prompt, 4) for id_, prompt in prompts.items()])
    tokens: dict[int, list[int]] = {}
    first_seen: list[int] = []
    most_running = 0
    while backend.has_unfinished():
        outputs = backend.step()
        first_seen += [output.request_id for output in outputs if output.request_id not in first_seen]
        collect(outputs, tokens)
        most_running = max(most_running, backend.stats().running)
        backend.check_integrity()
    assert most_running == 8
    assert first_seen == sorted(prompts)
    assert tokens == {id_: generate("llama", prompt, 4) for id_, prompt in prompts.items()}


def test_a_prefill_stays_within_its_tokens_padding_counted(make_backend: MakeBackend) -> None:
    backend = make_backend(limits=WarmupLimits(60, 100), scheduler={"max_step_tokens": 50})
    backend.add([make_request(id_, random_tokens(length, id_), 1) for id_, length in enumerate((3, 12, 3, 3, 13, 60))])
    prefills = []
    while backend.has_unfinished():
        prefills.append([output.request_id for output in backend.step()])
    assert prefills == [[0, 1, 2, 3], [4], [5]], "4 rows of 12 columns are 48 tokens; one long prompt runs alone"


def test_log_probabilities_of_prompts_and_tokens_are_the_models(
    make_backend: MakeBackend, tiny_model: TinyModel
) -> None:
    backend = make_backend()
    prompts = [random_tokens(9, 1), random_tokens(4, 2)]
    backend.add([make_request(0, prompts[0], 2, prefill_logprobs=True, top_n_tokens=3), make_request(1, prompts[1], 2)])
    first = backend.step()
    second = backend.step()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompts[0]])).logits[0].log_softmax(-1)
    assert first[0].prefill_logprobs is not None
    assert math.isnan(first[0].prefill_logprobs[0])
    expected = logprobs[:-1].gather(1, torch.tensor(prompts[0][1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(first[0].prefill_logprobs[1:]), expected, atol=1e-4, rtol=0)
    assert first[0].token.logprob == pytest.approx(logprobs[-1].max().item(), abs=1e-4)
    assert [token.token_id for token in first[0].top_tokens] == logprobs[-1].topk(3).indices.tolist()
    assert first[1].prefill_logprobs is None
    assert second[0].prefill_logprobs is None


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(make_backend: MakeBackend) -> None:
    backend = make_backend()
    request = make_request(7, random_tokens(6, 1), 10, do_sample=True, temperature=1.5, seed=3)
    backend.add([request])
    alone = run_to_end(backend)[7]
    backend.add([make_request(1, random_tokens(25, 2), 12), request, make_request(2, random_tokens(2, 3), 3)])
    assert run_to_end(backend)[7] == alone


def test_requests_end_by_length_and_by_eos(make_backend: MakeBackend, generate: Callable[..., list[int]]) -> None:
    backend = make_backend()
    prompt = random_tokens(6, 1)
    greedy = generate("llama", prompt, 6)
    object.__setattr__(backend._info.model, "eos_token_ids", (greedy[2],))
    try:
        backend.add([Request(RequestId(0), prompt, SamplingParams(max_new_tokens=50)), make_request(1, prompt, 2)])
        outputs = [output for _ in range(3) for output in backend.step()]
    finally:
        object.__setattr__(backend._info.model, "eos_token_ids", (2,))
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    stop_at = greedy.index(greedy[2])
    assert ends == {0: FinishReason.EOS_TOKEN, 1: FinishReason.LENGTH}
    assert len([output for output in outputs if output.request_id == 0]) == stop_at + 1
    assert not backend.has_unfinished()


def test_a_failing_step_ends_its_own_requests_alone(
    make_backend: MakeBackend, generate: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    prompts = {id_: random_tokens(5 + id_, id_) for id_ in range(4)}
    backend.add([make_request(id_, prompts[id_]) for id_ in (0, 1, 2)])
    backend.step([RequestId(0), RequestId(1)])
    assert backend._model is not None
    with monkeypatch.context() as patch:
        patch.setattr(backend._model, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(StepError, match="ZeroDivisionError") as failure:
            backend.step([RequestId(1)])
    assert failure.value.request_ids == {1}
    backend.check_integrity()
    backend.add([make_request(1, prompts[1]), make_request(3, prompts[3])])
    tokens = {0: generate("llama", prompts[0])[:1]}
    for id_, found in run_to_end(backend).items():
        tokens[id_] = tokens.get(id_, []) + found
    assert tokens == {id_: generate("llama", prompt) for id_, prompt in prompts.items()}


def test_bad_requests_are_refused_and_none_of_their_call_is_taken(make_backend: MakeBackend) -> None:
    backend = make_backend()
    good = make_request(0, [5, 6])
    for bad, error in [
        (make_request(1, []), RequestError),
        (make_request(1, [96]), RequestError),
        (make_request(1, [5] * 61), CapacityError),
        (make_request(1, [5] * 60, 41), CapacityError),
        (make_request(0, [5]), DuplicateRequestError),
    ]:
        with pytest.raises(error):
            backend.add([good, bad])
        assert not backend.has_unfinished()
    backend.add([good])
    with pytest.raises(DuplicateRequestError):
        backend.add([good])


def test_nothing_runs_before_the_warm_up_or_after_the_end(tiny_model: TinyModel, resolved: Resolve) -> None:
    backend = ContiguousBackend.create(resolved(tiny_model("llama"), cache={"num_blocks": 64}))
    for call in (lambda: backend.add([make_request(0, [5])]), backend.step):
        with pytest.raises(UnavailableError, match="warmup"):
            call()
    assert backend.stats().num_total_blocks == 0
    backend.warmup(LIMITS)
    backend.add([make_request(0, [5])])
    with pytest.raises(UnavailableError, match="running"):
        backend.warmup(LIMITS)
    backend.close()
    backend.close()
    assert not backend.has_unfinished()
    for call in (lambda: backend.add([make_request(0, [5])]), backend.step, lambda: backend.warmup(LIMITS)):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_the_capacity_follows_the_budget(tiny_model: TinyModel, resolved: Resolve) -> None:
    bytes_per_token = 3 * 2 * 16 * 4
    for cache, tokens in [
        ({"num_blocks": 50}, 800),
        ({"memory": 1000 * bytes_per_token + 5}, 1000),
        ({"memory_fraction": 0.5}, 256 * 128),
        ({"num_blocks": 3}, 48),
    ]:
        backend = ContiguousBackend.create(resolved(tiny_model("llama"), cache=cache))
        capacity = backend.warmup(WarmupLimits())
        assert capacity.num_blocks == capacity.max_cache_tokens == tokens
        assert capacity.max_total_tokens == min(128, tokens)
        assert capacity.max_input_tokens == capacity.max_total_tokens - 1


def test_limits_that_the_budget_or_the_model_cannot_hold_are_refused(tiny_model: TinyModel, resolved: Resolve) -> None:
    backend = ContiguousBackend.create(resolved(tiny_model("llama"), cache={"num_blocks": 3}))
    for limits, text in [
        (WarmupLimits(max_total_tokens=100), "holds 48 tokens"),
        (WarmupLimits(max_total_tokens=129), "made for 128"),
        (WarmupLimits(max_input_tokens=50, max_total_tokens=50), "must be at least 1 and below"),
    ]:
        with pytest.raises(CapacityError, match=text):
            backend.warmup(limits)
    capacity = backend.warmup(WarmupLimits(max_input_tokens=20, max_total_tokens=40))
    assert (capacity.max_input_tokens, capacity.max_total_tokens) == (20, 40)


def test_a_kv_dtype_other_than_the_models_is_refused(tiny_model: TinyModel, resolved: Resolve) -> None:
    with pytest.raises(UnsupportedError, match=r"cache\.kv_dtype"):
        ContiguousBackend.create(resolved(tiny_model("llama"), cache={"kv_dtype": "bf16"}))


def test_says_what_it_is(make_backend: MakeBackend) -> None:
    info = make_backend().info
    assert (info.backend, info.attention_kernels, info.block_size) == ("contiguous", "sdpa", 1)
    assert (info.requires_padding, info.can_chunk_prefill, info.has_prefix_cache) == (True, False, False)
    assert load_plugin(BACKENDS, "contiguous") is ContiguousBackend


def test_eager_attention_is_taken_where_the_architecture_needs_it(
    make_backend: MakeBackend, generate: Callable[..., list[int]]
) -> None:
    backend = make_backend("gemma2")
    assert backend.info.attention_kernels == "eager"
    prompts = {id_: random_tokens(length, id_) for id_, length in enumerate((3, 17))}
    backend.add([make_request(id_, prompt) for id_, prompt in prompts.items()])
    assert run_to_end(backend) == {id_: generate("gemma2", prompt) for id_, prompt in prompts.items()}


def test_the_search_for_the_largest_batch_ends_at_what_fits() -> None:
    tried = []

    def try_batch(num_rows: int) -> None:
        tried.append(num_rows)
        if num_rows > 70:
            raise torch.OutOfMemoryError

    assert measure_largest_batch(try_batch, 100) == 66
    assert tried == [100, 90, 81, 73, 66]
    with pytest.raises(CapacityError, match="not one request"):
        measure_largest_batch(lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError()), 3)


def test_the_full_decode_of_the_warm_up_fills_every_column(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    model = backend._require_model()
    seen = []
    forward = model.forward

    def recording_forward(batch: PaddedInput, cache: ReservedCache) -> torch.Tensor:
        seen.append((batch.mask.shape, cache.num_columns))
        return forward(batch, cache)

    monkeypatch.setattr(model, "forward", recording_forward)
    run_full_decode(model, backend._sampler, num_rows=3, max_total_tokens=40)
    assert seen == [((3, 40), 39)]
