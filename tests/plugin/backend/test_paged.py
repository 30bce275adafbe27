"""The paged backend through its interface: every output equals what the model gives without any cache."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.errors import (
    CapacityError,
    DuplicateRequestError,
    RequestError,
    StepError,
    UnavailableError,
)
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.requests import CacheNamespace, FinishReason, Request, RequestId, SamplingParams, StepOutput


def make_request(id_: int, prompt_ids: Sequence[int], max_new_tokens: int = 8, **params: Any) -> Request:
    namespace = params.pop("namespace", CacheNamespace())
    parent_id = params.pop("parent_id", None)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **params)
    return Request(RequestId(id_), list(prompt_ids), sampling, namespace, parent_id)


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 97), k=num_tokens)


def run(backend: PagedBackend, requests: Sequence[Request] = ()) -> dict[int, list[StepOutput]]:
    """Adds requests and steps until nothing is live."""
    backend.add(requests)
    outputs: dict[int, list[StepOutput]] = defaultdict(list)
    while backend.has_unfinished():
        for output in backend.step():
            outputs[output.request_id].append(output)
        backend.check_integrity()
    return outputs


def token_ids(outputs: Sequence[StepOutput]) -> list[int]:
    return [output.token.token_id for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler__max_step_tokens": 7},
        {"cache__prefix_caching": False},
        {"cache__block_size": 8, "scheduler__max_num_sequences": 3},
        {"num_blocks": 9, "scheduler__max_step_tokens": 16},
    ],
    ids=["large", "small chunks", "no prefix cache", "few sequences", "pool of a tenth"],
)
def test_batched_output_equals_plain_output(make_backend: Any, token_model: TokenModel, settings: dict) -> None:
    backend = make_backend(**settings)
    prompts = [make_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 40, 64, 90)]
    outputs = run(backend, [make_request(i, prompt, 40) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        assert token_ids(outputs[index]) == token_model.continue_greedily(prompt, 40)
        assert [output.finish_reason for output in outputs[index]][-1] is FinishReason.LENGTH
        assert not any(output.finish_reason for output in outputs[index][:-1])


def test_pool_of_a_tenth_of_the_need_preempts_and_streams_each_token_once(
    make_backend: Any, token_model: TokenModel
) -> None:
    backend = make_backend(num_blocks=24, scheduler__max_step_tokens=64)
    prompts = [make_prompt(20 + 3 * i, seed=i) for i in range(32)]
    outputs = run(backend, [make_request(i, prompt, 60) for i, prompt in enumerate(prompts)])
    assert backend.stats().preemptions > 0
    for index, prompt in enumerate(prompts):
        assert token_ids(outputs[index]) == token_model.continue_greedily(prompt, 60)


def test_one_hundred_tokens_take_seven_blocks_the_last_holding_four(make_backend: Any) -> None:
    backend = make_backend()
    backend.add([make_request(0, make_prompt(100), 2)])
    backend.step()
    stats = backend.stats()
    assert (stats.num_used_blocks, stats.num_used_slots) == (7, 100)
    assert stats.fragmentation == pytest.approx(12 / 112)
    assert stats.kv_bytes_in_use / stats.kv_bytes_reserved == pytest.approx(100 / 112)
    backend.abort([RequestId(0)])


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_prompts_around_whole_blocks_sent_twice_compute_at_least_one_token(
    make_backend: Any, token_model: TokenModel, num_blocks: int, excess: int
) -> None:
    backend = make_backend()
    prompt = make_prompt(num_blocks * 16 + excess)
    first = run(backend, [make_request(0, prompt)])[0]
    second = run(backend, [make_request(1, prompt)])[1]
    assert token_ids(first) == token_ids(second) == token_model.continue_greedily(prompt, 8)
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == (len(prompt) - 1) // 16 * 16
    longer = run(backend, [make_request(2, prompt + make_prompt(20, seed=9))])[2]
    assert longer[0].num_cached_tokens == len(prompt) // 16 * 16


def test_same_long_prompt_four_times_alone_then_among_others_hits_and_stays_equal(
    make_backend: Any, token_model: TokenModel
) -> None:
    backend = make_backend(scheduler__max_step_tokens=100)
    prompt = make_prompt(333)
    wanted = token_model.continue_greedily(prompt, 8)
    for attempt in range(4):
        [output, *more] = run(backend, [make_request(attempt, prompt)])[attempt]
        assert token_ids([output, *more]) == wanted
        assert output.num_cached_tokens == (320 if attempt else 0)
    others = [make_request(10 + i, make_prompt(50, seed=100 + i), 20) for i in range(5)]
    outputs = run(backend, [*others, make_request(4, prompt)])
    assert token_ids(outputs[4]) == wanted
    assert backend.stats().prefix_cache_hit_tokens == 4 * 320


def test_each_warm_up_sets_the_step_by_the_prefill_tokens_that_a_router_asks_for(make_backend: Any) -> None:
    """So that `--max-batch-prefill-tokens` is what its operator thinks it is."""
    backend = make_backend(scheduler__max_num_sequences=4)
    for index, (told, sizes) in enumerate([(64, [64, 64, 22]), (100, [100, 50]), (0, [150]), (3, [3] * 50)]):
        backend.warmup(WarmupLimits(max_prefill_tokens=told))
        backend.add([make_request(index, make_prompt(150), 1)])
        found = []
        while backend.has_unfinished():
            plan = backend.schedule()
            found.append(plan.num_tokens)
            backend.commit(plan, backend.execute(plan))
        assert found == sizes


def test_32_requests_with_one_prefix_sent_after_the_first_save_all_of_it(make_backend: Any) -> None:
    backend = make_backend(num_blocks=4096)
    prefix = make_prompt(1024)
    run(backend, [make_request(0, prefix + [1] * 64)])
    run(backend, [make_request(i, prefix + make_prompt(64, seed=i)) for i in range(1, 32)])
    assert backend.stats().saved_prefill_tokens >= 31 * 1024


def test_32_requests_with_one_prefix_sent_at_once_save_most_of_it(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend(num_blocks=4096, scheduler__max_step_tokens=512)
    prompts = [make_prompt(1024) + make_prompt(64, seed=i + 1) for i in range(32)]
    outputs = run(backend, [make_request(i, prompt, 4) for i, prompt in enumerate(prompts)])
    assert backend.stats().saved_prefill_tokens >= 30 * 1024
    for index in (0, 1, 31):
        assert token_ids(outputs[index]) == token_model.continue_greedily(prompts[index], 4)


def test_evicted_prefix_is_a_miss_and_can_be_cached_again(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend(num_blocks=8)
    old, new = make_prompt(100, seed=1), make_prompt(110, seed=2)
    run(backend, [make_request(0, old)])
    run(backend, [make_request(1, new)])
    again = run(backend, [make_request(2, old)])[2]
    assert again[0].num_cached_tokens < 96
    assert token_ids(again) == token_model.continue_greedily(old, 8)
    assert run(backend, [make_request(3, old)])[3][0].num_cached_tokens == 96
    assert backend.stats().evictions > 0


def test_nothing_is_reused_across_namespaces_and_all_within(make_backend: Any) -> None:
    backend = make_backend()
    prompt = make_prompt(64)
    namespaces = [
        CacheNamespace(),
        CacheNamespace(salt="a"),
        CacheNamespace(adapter_id="a"),
        CacheNamespace(salt="a", adapter_id="a"),
    ]
    for round_, num_cached_tokens in enumerate((0, 48)):
        for index, namespace in enumerate(namespaces):
            id_ = 10 * round_ + index
            outputs = run(backend, [make_request(id_, prompt, namespace=namespace)])[id_]
            assert outputs[0].num_cached_tokens == num_cached_tokens


def test_prompt_whose_step_never_ran_leaves_nothing_to_hit(
    make_backend: Any, token_model: TokenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    prompt = make_prompt(80)
    backend.add([make_request(0, prompt)])
    with monkeypatch.context() as patch:
        patch.setattr(token_model, "forward", lambda *_: 1 / 0)
        with pytest.raises(StepError):
            backend.step()
    outputs = run(backend, [make_request(1, prompt)])[1]
    assert outputs[0].num_cached_tokens == 0
    assert token_ids(outputs) == token_model.continue_greedily(prompt, 8)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6], ids=["queued", "in mid-chunk", "later chunk", "decoding"])
def test_cancelled_request_gives_its_blocks_back_and_its_prefix_stays_right(
    make_backend: Any, token_model: TokenModel, num_steps: int
) -> None:
    backend = make_backend(scheduler__max_step_tokens=20)
    prompt = make_prompt(75)
    backend.add([make_request(0, prompt, 50)])
    for _ in range(num_steps):
        backend.step()
    backend.abort([RequestId(0)])
    assert backend.stats().num_used_blocks == 0
    assert not backend.has_unfinished()
    outputs = run(backend, [make_request(0, prompt)])[0]
    assert token_ids(outputs) == token_model.continue_greedily(prompt, 8)


def test_preempted_request_can_be_cancelled(make_backend: Any) -> None:
    backend = make_backend(num_blocks=6)
    backend.add([make_request(i, make_prompt(10, seed=i), 60) for i in range(2)])
    while backend.has_unfinished() and not backend.stats().preemptions:
        backend.step()
    assert backend.stats().waiting == 1
    backend.abort([RequestId(1)])
    backend.abort([RequestId(0)])


def test_samples_of_one_prompt_share_its_blocks_and_equal_separate_requests(make_backend: Any) -> None:
    prompt = make_prompt(100)
    params = {"do_sample": True, "temperature": 3.0}
    alone = [token_ids(run(make_backend(), [make_request(0, prompt, 12, seed=seed, **params)])[0]) for seed in range(4)]
    backend = make_backend()
    backend.add([make_request(0, prompt, 12, seed=0, **params)])
    outputs: dict[int, list[int]] = defaultdict(list)
    outputs[0] += token_ids(backend.step())
    backend.add([make_request(seed, prompt, 12, seed=seed, parent_id=0, **params) for seed in range(1, 4)])
    most_blocks = 0
    while backend.has_unfinished():
        for output in backend.step():
            outputs[output.request_id].append(output.token.token_id)
        most_blocks = max(most_blocks, backend.stats().num_used_blocks)
        backend.check_integrity()
    assert [outputs[seed] for seed in range(4)] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert backend.stats().copies >= 3
    assert most_blocks <= 6 + 4 * 1, "six full blocks are shared, each sample has a last one of its own"


def test_seed_reproduces_a_request_whatever_the_batch_around_it(make_backend: Any) -> None:
    request = make_request(0, make_prompt(30), 20, seed=7, temperature=2.0)
    alone = token_ids(run(make_backend(), [request])[0])
    others = [make_request(i, make_prompt(40, seed=i), 20, temperature=2.0) for i in range(1, 6)]
    assert token_ids(run(make_backend(num_blocks=12), [*others, request])[0]) == alone


@pytest.mark.parametrize("settings", [{}, {"scheduler__max_step_tokens": 13}, {"num_blocks": 12}])
def test_prompt_logprobs_are_whole_and_equal_with_cached_prefix_chunks_and_preemption(
    make_backend: Any, settings: dict
) -> None:
    prompt = make_prompt(70)
    [wanted] = {run(make_backend(), [make_request(0, prompt, prefill_logprobs=True)])[0][0].prefill_logprobs}
    assert wanted is not None
    assert len(wanted) == len(prompt)
    assert math.isnan(wanted[0])
    backend = make_backend(**settings)
    overlapping = prompt[:50] + make_prompt(30, seed=5)
    requests = [make_request(i, p, 30, prefill_logprobs=True) for i, p in enumerate([overlapping, prompt, prompt])]
    outputs = run(backend, requests)
    for index in (1, 2):
        assert outputs[index][0].prefill_logprobs is not None
        assert outputs[index][0].prefill_logprobs[1:] == pytest.approx(wanted[1:], abs=1e-4)
        assert all(output.prefill_logprobs is None for output in outputs[index][1:])


def test_request_that_can_never_fit_is_refused_at_once_and_the_next_one_runs(
    make_backend: Any, token_model: TokenModel
) -> None:
    backend = make_backend(num_blocks=8)
    with pytest.raises(CapacityError, match="128"):
        backend.add([make_request(0, make_prompt(8), 4), make_request(1, make_prompt(120), 10)])
    assert not backend.has_unfinished()
    prompt = make_prompt(8)
    assert token_ids(run(backend, [make_request(0, prompt)])[0]) == token_model.continue_greedily(prompt, 8)
    exact = make_prompt(120)
    assert token_ids(run(backend, [make_request(2, exact, 8)])[2]) == token_model.continue_greedily(exact, 8)


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([make_request(0, [])], RequestError),
        ([make_request(0, [97])], RequestError),
        ([make_request(0, [-1])], RequestError),
        ([make_request(2**64, [1])], RequestError),
        ([make_request(0, [1], 10_000)], CapacityError),
        ([make_request(0, [1] * 8192)], CapacityError),
        ([make_request(0, [1]), make_request(0, [1])], DuplicateRequestError),
    ],
)
def test_bad_request_is_refused_and_nothing_of_its_call_is_taken(
    make_backend: Any, requests: list[Request], error: type[Exception]
) -> None:
    backend = make_backend(num_blocks=2048)
    with pytest.raises(error, match="request"):
        backend.add([make_request(5, [1, 2]), *requests])
    assert not backend.has_unfinished()


def test_live_id_is_refused_and_free_again_after_the_end(make_backend: Any) -> None:
    backend = make_backend()
    backend.add([make_request(0, [1])])
    with pytest.raises(DuplicateRequestError):
        backend.add([make_request(0, [1])])
    run(backend)
    run(backend, [make_request(0, [1])])


def test_failed_step_ends_its_requests_alone(
    make_backend: Any, token_model: TokenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    prompt = make_prompt(40)
    backend.add([make_request(0, prompt), make_request(1, make_prompt(40, seed=1))])
    with monkeypatch.context() as patch:
        patch.setattr(token_model, "forward", lambda *_: 1 / 0)
        with pytest.raises(StepError, match="ZeroDivisionError") as caught:
            backend.step(only=[RequestId(1)])
    assert caught.value.request_ids == {1}
    outputs = run(backend)
    assert list(outputs) == [0]
    assert token_ids(outputs[0]) == token_model.continue_greedily(prompt, 8)


def test_step_of_some_requests_leaves_the_others_where_they_are(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend()
    prompts = [make_prompt(20, seed=i) for i in range(3)]
    backend.add([make_request(i, prompt) for i, prompt in enumerate(prompts)])
    assert [output.request_id for output in backend.step(only=[RequestId(2), RequestId(1)])] == [1, 2]
    outputs = run(backend)
    assert [len(outputs[i]) for i in range(3)] == [8, 7, 7]
    assert token_ids(outputs[0]) == token_model.continue_greedily(prompts[0], 8)


def test_overcommit_tells_more_than_is_there_and_copes(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend(num_blocks=10, cache__overcommit=4.0)
    assert backend.warmup(WarmupLimits()).max_cache_tokens == 640
    prompts = [make_prompt(30, seed=i) for i in range(8)]
    outputs = run(backend, [make_request(i, prompt, 50) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        assert token_ids(outputs[index]) == token_model.continue_greedily(prompt, 50)


def test_warmup_answers_the_limits_asked_for_and_refuses_those_that_do_not_fit(make_backend: Any) -> None:
    backend = make_backend(num_blocks=64)
    capacity = backend.warmup(WarmupLimits(max_input_tokens=500, max_total_tokens=1000))
    assert (capacity.max_input_tokens, capacity.max_total_tokens, capacity.num_blocks) == (500, 1000, 64)
    with pytest.raises(CapacityError, match=r"cache\.num_blocks"):
        backend.warmup(WarmupLimits(max_total_tokens=1025))
    with pytest.raises(CapacityError, match="made for"):
        backend.warmup(WarmupLimits(max_total_tokens=10_000))
    with pytest.raises(CapacityError, match="below"):
        backend.warmup(WarmupLimits(max_input_tokens=100, max_total_tokens=100))


def test_a_warmup_that_fails_leaves_the_pool_of_the_one_before(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend(num_blocks=64)
    backend.warmup(WarmupLimits(max_input_tokens=500, max_total_tokens=1000))
    prompt = make_prompt(30, seed=1)
    for limits in (WarmupLimits(max_total_tokens=1025), WarmupLimits(max_total_tokens=10_000)):
        with pytest.raises(CapacityError):
            backend.warmup(limits)
        assert backend.stats().num_total_blocks == 64
        outputs = run(backend, [make_request(0, prompt, 50)])
        assert token_ids(outputs[0]) == token_model.continue_greedily(prompt, 50)
        with pytest.raises(CapacityError, match="limit"):
            backend.add([make_request(0, make_prompt(501, seed=1), 1)])


def test_warmup_is_refused_while_requests_are_live_and_empties_the_cache_otherwise(make_backend: Any) -> None:
    backend = make_backend()
    prompt = make_prompt(64)
    backend.add([make_request(0, prompt)])
    with pytest.raises(UnavailableError):
        backend.warmup(WarmupLimits())
    run(backend)
    backend.warmup(WarmupLimits())
    assert run(backend, [make_request(0, prompt)])[0][0].num_cached_tokens == 0


def test_closed_and_cold_backends_refuse_work(make_backend: Any, token_model: TokenModel) -> None:
    backend = make_backend()
    backend.add([make_request(0, [1])])
    backend.close()
    backend.close()
    for call in (backend.step, lambda: backend.add([make_request(0, [1])]), lambda: backend.warmup(WarmupLimits())):
        with pytest.raises(UnavailableError):
            call()
    cold = PagedBackend(backend._config, token_model, backend._kernels)
    with pytest.raises(UnavailableError, match="warmup"):
        cold.step()
    assert cold.stats().num_total_blocks == 0


def test_hundreds_of_mixed_requests_some_cancelled_some_bad_leave_the_pool_as_it_was(make_backend: Any) -> None:
    backend = make_backend(num_blocks=64, scheduler__max_step_tokens=256)
    random_ = random.Random(0)
    num_free = backend.stats().num_free_blocks
    next_id = num_bad = 0
    while next_id < 500 or backend.has_unfinished():
        while next_id < 500 and backend.stats().waiting < 16:
            prompt = make_prompt(random_.randint(1, 80), seed=random_.randint(0, 20))
            if random_.random() < 0.1:
                prompt[random_.randrange(len(prompt))] = 10_000
                num_bad += 1
                with pytest.raises(RequestError):
                    backend.add([make_request(next_id, prompt)])
            else:
                backend.add([make_request(next_id, prompt, random_.randint(1, 8))])
            next_id += 1
        outputs = backend.step()
        if random_.random() < 0.3 and outputs:
            backend.abort([random_.choice(outputs).request_id])
    stats = backend.stats()
    assert num_bad > 30
    assert stats.num_free_blocks + stats.num_cached_blocks == num_free
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize("error", [KeyError("a plugin's own"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("place", ["execute", "commit", "end of commit"])
def test_whatever_is_raised_between_schedule_and_commit_ends_the_plan_alone(
    make_backend: Any, token_model: TokenModel, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
) -> None:
    backend = make_backend()
    backend.add([make_request(1, range(20), max_new_tokens=4)])
    backend.add([make_request(2, range(30, 60), max_new_tokens=4)])
    backend.step(only=[2])

    def fail(*_: Any) -> Any:
        if place == "end of commit":
            commit(*_)
        raise error

    scheduler = backend._pool.scheduler
    commit = scheduler.commit
    with monkeypatch.context() as patch:
        if place == "execute":
            patch.setattr(backend._executor, "run", fail)
        else:
            patch.setattr(scheduler, "commit", fail)
        with pytest.raises(StepError if isinstance(error, Exception) else type(error)):
            backend.step(only=[1])
    backend.check_integrity()
    assert [output.request_id for output in backend.step()] == [2]
    backend.add([make_request(1, range(20), max_new_tokens=4)])
    assert token_ids(run(backend)[1]) == token_model.continue_greedily(list(range(20)), 4)
