"""Limits as resolved, before and after a cache is sized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.limits import ResolvedLimits, resolve_limits
from pagedkv.plugin.resolved_config import resolve_config

NOTHING_ASKED = WarmupLimits()
MODEL = TokenModel().spec
"""Made for 8192 tokens."""


def resolve(wanted: WarmupLimits = NOTHING_ASKED, *, can_chunk_prefill: bool = True, **limits: Any) -> ResolvedLimits:
    overrides = {"model.path": "none", **{f"limits.{name}": value for name, value in limits.items()}}
    config = resolve_config(load_config(None, overrides, {}), MODEL)
    return resolve_limits(wanted, config, MODEL, can_chunk_prefill=can_chunk_prefill)


def lengths(limits: ResolvedLimits) -> tuple[int, int]:
    return limits.max_input_tokens, limits.max_total_tokens


def test_what_nobody_asks_for_is_the_models_and_follows_the_cache() -> None:
    limits = resolve()
    assert lengths(limits) == (8191, 8192)
    assert (limits.max_prefill_tokens, limits.max_num_sequences) == (2048, 256)
    assert lengths(limits.fit(10_000)) == (8191, 8192)
    assert lengths(limits.fit(640)) == (639, 640)
    assert lengths(limits.fit(2)) == (1, 2)
    with pytest.raises(CapacityError, match="holds 1 tokens"):
        limits.fit(1)


def test_configured_lengths_bound_and_follow_the_cache_too() -> None:
    limits = resolve(max_input_tokens=500, max_total_tokens=1000)
    assert lengths(limits) == (500, 1000)
    assert lengths(limits.fit(640)) == (500, 640)
    assert lengths(limits.fit(400)) == (399, 400)


def test_lengths_that_are_asked_for_go_before_configured_ones_and_stay_or_are_refused() -> None:
    limits = resolve(WarmupLimits(600, 1200, 512, 8), max_input_tokens=500, max_total_tokens=1000)
    assert lengths(limits.fit(1200)) == (600, 1200)
    assert (limits.max_prefill_tokens, limits.max_num_sequences) == (512, 8)
    with pytest.raises(CapacityError, match=r"holds 1199 tokens.*takes 1200"):
        limits.fit(1199)
    only_input = resolve(WarmupLimits(max_input_tokens=600))
    assert lengths(only_input.fit(601)) == (600, 601)
    with pytest.raises(CapacityError, match="takes 601"):
        only_input.fit(600)


@pytest.mark.parametrize(("told", "step"), [(0, 2048), (512, 512), (2048, 2048), (50_000, 2048)])
def test_a_router_makes_steps_smaller_and_never_larger(told: int, step: int) -> None:
    """Its launcher computes a number from the GPU where nobody gives one: our activations may not fit it."""
    assert resolve(WarmupLimits(max_prefill_tokens=told)).max_step_tokens == step


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (WarmupLimits(max_total_tokens=8193), "made for 8192"),
        (WarmupLimits(max_input_tokens=8192), "must be"),
        (WarmupLimits(100, 100), "must be"),
        (WarmupLimits(max_total_tokens=1), "must be"),
    ],
)
def test_what_no_model_could_do_is_refused(wanted: WarmupLimits, text: str) -> None:
    with pytest.raises(CapacityError, match=text):
        resolve(wanted)


@pytest.mark.parametrize("can_chunk_prefill", [True, False])
@pytest.mark.parametrize("may_chunk_prefill", [True, False])
def test_without_chunks_a_step_bounds_prompts(can_chunk_prefill: bool, may_chunk_prefill: bool) -> None:
    wanted = WarmupLimits(max_prefill_tokens=4096, may_chunk_prefill=may_chunk_prefill)
    is_chunked = can_chunk_prefill and may_chunk_prefill
    assert lengths(resolve(wanted, can_chunk_prefill=can_chunk_prefill)) == (8191 if is_chunked else 4096, 8192)
    # What was asked for is repeated: a router that finds it too long says so itself, in words of its own flags.
    assert resolve(replace(wanted, max_input_tokens=4097), can_chunk_prefill=can_chunk_prefill).max_input_tokens == 4097


def test_without_chunks_and_without_a_router_a_prompt_may_be_longer_than_a_step() -> None:
    assert resolve(can_chunk_prefill=False).max_input_tokens == 8191


LENGTH = st.integers(0, 60)


@given(LENGTH, LENGTH, LENGTH, st.booleans(), st.integers(1, 60))
def test_lengths_are_kept_or_refused_and_always_leave_room(
    max_input_tokens: int, max_total_tokens: int, max_prefill_tokens: int, may_chunk: bool, num_cache_tokens: int
) -> None:
    wanted = WarmupLimits(max_input_tokens, max_total_tokens, max_prefill_tokens, may_chunk_prefill=may_chunk)
    try:
        limits = resolve(wanted).fit(num_cache_tokens)
    except CapacityError:
        return
    assert limits.max_input_tokens == max_input_tokens or not max_input_tokens
    assert limits.max_total_tokens == max_total_tokens or not max_total_tokens
    assert 1 <= limits.max_input_tokens < limits.max_total_tokens <= num_cache_tokens
    assert may_chunk or not max_prefill_tokens or limits.max_input_tokens <= max(max_prefill_tokens, max_input_tokens)
