"""Sampling parameters and their bounds, when a request ends, and the checks before a backend takes it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedkv.plugin.errors import CapacityError, DuplicateRequestError, RequestError
from pagedkv.plugin.requests import (
    MAX_NEW_TOKENS,
    MAX_TOP_N_TOKENS,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    find_finish_reason,
)
from pagedkv.plugin.validation import validate_requests

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_new_tokens", [1, MAX_NEW_TOKENS], [0, -1, 2**31]),
    ("temperature", [0.01, 1.0, 100.0], [0.0, -1.0, math.nan, math.inf]),
    ("top_k", [0, 1, 2**32 - 1], [-1, 2**32]),
    ("top_p", [0.01, 1.0], [0.0, 1.01, -0.5, math.nan]),
    ("typical_p", [0.01, 1.0], [0.0, 1.01, math.nan]),
    ("seed", [None, 0, 2**64 - 1], [-1, 2**64]),
    ("repetition_penalty", [0.01, 1.0, 5.0], [0.0, -1.0, math.nan, math.inf]),
    ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.nan, math.inf]),
    ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.nan, math.inf]),
    ("relative_frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.nan, math.inf]),
    ("min_p", [0.0, 0.5, 1.0], [-0.1, 1.1, math.nan]),
    ("min_new_tokens", [0, 1, 128], [-1, 129]),
    ("top_n_tokens", [0, MAX_TOP_N_TOKENS], [-1, MAX_TOP_N_TOKENS + 1]),
    ("n", [1, 128], [0, 129]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in BOUNDS for value in good])
def test_a_value_at_its_bound_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in BOUNDS for value in bad])
def test_a_value_past_its_bound_is_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value}; it must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [{"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.1}],
)
def test_any_warper_switches_sampling_on(changes: dict[str, Any]) -> None:
    assert SamplingParams(**changes).is_sampled


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_stop_token_is_a_token_id(token_id: int) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(5, token_id))


def test_penalties_seed_and_watermark_alone_stay_greedy() -> None:
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1, seed=3, watermark=True, top_n_tokens=5
    )
    assert not params.is_sampled


@pytest.mark.parametrize(
    ("num_generated_tokens", "token_id", "ignore_eos", "reason"),
    [
        (3, 7, False, None),
        (3, 2, False, FinishReason.EOS_TOKEN),
        (3, 2, True, None),
        (4, 7, False, FinishReason.LENGTH),
        (4, 2, False, FinishReason.LENGTH),
        (4, 2, True, FinishReason.LENGTH),
    ],
)
def test_length_is_reported_before_the_end_token(
    num_generated_tokens: int, token_id: int, ignore_eos: bool, reason: FinishReason | None
) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=ignore_eos)
    assert find_finish_reason(params, num_generated_tokens, token_id, (1, 2)) is reason


def make_request(id_: int = 5, prompt_ids: Any = (1, 2, 3), max_new_tokens: int = 4) -> Request:
    return Request(RequestId(id_), prompt_ids, SamplingParams(max_new_tokens=max_new_tokens))


def check(*requests: Request, live: tuple[int, ...] = ()) -> None:
    live_ids = [RequestId(id_) for id_ in live]
    validate_requests(requests, live_ids, vocab_size=100, max_input_tokens=8, max_total_tokens=12)


def test_requests_at_the_limits_are_taken() -> None:
    check(make_request(0, range(8), 4), make_request(2**64 - 1, [0, 99], 10), live=(1,))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (make_request(prompt_ids=()), RequestError, "request 5: the prompt has no tokens"),
        (make_request(prompt_ids=(1, 100)), RequestError, "token id 100 is outside the model's vocabulary of 100"),
        (make_request(prompt_ids=(-1,)), RequestError, "token id -1 is outside"),
        (make_request(prompt_ids=("a",)), RequestError, "no token id"),
        (make_request(prompt_ids=(2**70,)), RequestError, "no token id"),
        (make_request(-1), RequestError, "unsigned 64-bit"),
        (make_request(2**64), RequestError, "unsigned 64-bit"),
        (make_request(prompt_ids=range(9), max_new_tokens=1), CapacityError, "9 tokens, the limit is 8"),
        (make_request(prompt_ids=range(8), max_new_tokens=5), CapacityError, "exceed the limit of 12"),
        (make_request(7), DuplicateRequestError, "request 7 is running already"),
    ],
)
def test_a_bad_request_is_refused_by_name(request_: Request, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check(make_request(1), request_, live=(7,))


def test_one_id_twice_in_a_call_is_refused() -> None:
    with pytest.raises(DuplicateRequestError, match="request 3"):
        check(make_request(3), make_request(3))
