"""Which requests are sent, and when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.integration.measure.benchmark.workloads import (
    ALL_AT_ONCE,
    GROUPS,
    SHAPES,
    Arrivals,
    draw_plain_tokens,
    draw_warmup,
    draw_workload,
    select_shapes,
    to_text,
)
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_model_settings

TOKENS = range(1000, 9000)


class ByteTokenizer:
    """A token a byte; it has no words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    settings = resolve_model_settings(parse_config({"model": {"path": str(demo_model)}}))
    return load_plugin(MODELS, "transformers").load_tokenizer(settings)


@pytest.mark.parametrize("name", SHAPES)
def test_requests_have_the_lengths_of_their_workload(name: str) -> None:
    shape = SHAPES[name]
    requests = draw_workload(shape, ALL_AT_ONCE, TOKENS, seed=0, repetition=0)
    assert len(requests) == shape.num_requests
    assert {len(request.prompt_ids) - shape.shared_tokens for request in requests} == set(shape.prompt_tokens)
    assert {request.max_new_tokens for request in requests} == set(shape.new_tokens)
    assert {request.arrival_s for request in requests} == {0.0}
    assert max(len(one.prompt_ids) + one.max_new_tokens for one in requests) <= shape.max_total_tokens
    shared = {tuple(request.prompt_ids[: shape.shared_tokens]) for request in requests}
    assert len(shared) == 1


def test_requests_are_repeatable_and_repetitions_have_nothing_in_common_but_lengths() -> None:
    first, again, second, other_seed = (
        draw_workload(SHAPES["mixed"], ALL_AT_ONCE, TOKENS, seed, repetition)
        for seed, repetition in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again
    for other in (second, other_seed):
        assert [(len(one.prompt_ids), one.max_new_tokens) for one in other] == [
            (len(one.prompt_ids), one.max_new_tokens) for one in first
        ]
        assert not {tuple(one.prompt_ids[:16]) for one in other} & {tuple(one.prompt_ids[:16]) for one in first}


def test_warmup_is_short_and_of_every_workload() -> None:
    shapes = select_shapes(["short", "stream"])
    requests = draw_warmup(shapes, TOKENS, seed=0)
    assert [len(request.prompt_ids) for request in requests] == [128] * 4 + [128, 3072]
    assert max(request.max_new_tokens for request in requests) <= 16
    prompts = {tuple(one.prompt_ids[:16]) for one in draw_workload(shapes[0], ALL_AT_ONCE, TOKENS, 0, 0)}
    assert not prompts & {tuple(one.prompt_ids[:16]) for one in requests}


def test_names_and_groups_of_workloads() -> None:
    assert [shape.name for shape in select_shapes(["stream", "short", "short"])] == [
        "stream-128",
        "stream-3072",
        "short",
    ]
    assert [shape.name for shape in select_shapes(["all"])] == list(SHAPES)
    with pytest.raises(ConfigError, match=r"'chat'.*short.*stream"):
        select_shapes(["short", "chat"])
    assert all(name in SHAPES for names in GROUPS.values() for name in names)


def test_scaled_workloads_keep_their_requests() -> None:
    (shape,) = select_shapes(["prefix"], scale=1 / 64)
    assert (shape.num_requests, shape.shared_tokens, shape.prompt_tokens, shape.new_tokens) == (32, 16, (1,), (1,))


@given(st.floats(min_value=0.01, max_value=1000), st.integers(0, 9), st.integers(1, 50))
def test_arrivals_begin_at_once_and_do_not_go_back(rate: float, burst_size: int, count: int) -> None:
    times = Arrivals(rate, burst_size).draw(count, random.Random(0))
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)


def test_arrivals_have_the_rate_asked_for() -> None:
    poisson = Arrivals(rate=4).draw(4001, random.Random(0))
    assert poisson[-1] == pytest.approx(1000, rel=0.1)
    assert Arrivals(rate=4, burst_size=3).draw(7, random.Random(0)) == [0, 0, 0, 0.75, 0.75, 0.75, 1.5]


def test_plain_tokens_survive_text(tokenizer: Tokenizer) -> None:
    plain = draw_plain_tokens(tokenizer, 49152, seed=0)
    assert len(set(plain)) == 2048
    for request in draw_workload(SHAPES["mixed"], ALL_AT_ONCE, plain, seed=0, repetition=0):
        assert tokenizer.encode(to_text(tokenizer, request.prompt_ids), add_special_tokens=False) == request.prompt_ids


def test_tokenizer_without_words_gets_any_tokens_but_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert draw_plain_tokens(tokenizer, 256, seed=0) == list(range(256))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--through tgi"):
        to_text(tokenizer, [200, 200])  # type: ignore[arg-type]
