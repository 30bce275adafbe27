"""Penalties on tokens that are there already."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from pagedkv.plugin.sampling.penalties import TokenCounts, penalize_, penalize_output_


def counts_of(token_ids: list[int]) -> TokenCounts:
    counts = TokenCounts()
    counts.update(token_ids)
    return counts


@given(st.lists(st.lists(st.integers(0, 9), max_size=20), min_size=1, max_size=5))
def test_counts_keep_up_with_a_growing_sequence(additions: list[list[int]]) -> None:
    counts, token_ids = TokenCounts(), []
    for addition in additions:
        token_ids += addition
        counts.update(token_ids)
        assert dict(zip(counts.token_ids, counts.counts, strict=True)) == Counter(token_ids)
        assert counts.num_tokens == len(token_ids)


@pytest.mark.parametrize("penalty", [0.5, 0.8, 1.3, 2.0])
def test_repetition_penalty_as_the_reference_s(penalty: float) -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 4
    sequences = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(sequences, scores.clone())
    counts = [counts_of(row) for row in sequences.tolist()]
    penalize_(scores, [0, 1, 2], counts, [penalty] * 3, [0.0] * 3)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [-2.0, -0.5, 0.5, 2.0])
def test_relative_frequency_penalty_is_penalty_times_share_of_the_sequence(penalty: float) -> None:
    scores = torch.tensor([[1.0, -1.0, 2.0, 0.0]])
    penalize_(scores, [0], [counts_of([0, 1, 1, 3, 1])], [1.0], [penalty])
    expected = torch.tensor([[1.0 - penalty / 5, -1.0 - penalty * 3 / 5, 2.0, 0.0 - penalty / 5]])
    torch.testing.assert_close(scores, expected)


def test_repetition_comes_before_relative_frequency() -> None:
    scores = torch.tensor([[4.0, 0.0]])
    penalize_(scores, [0], [counts_of([0, 0])], [2.0], [1.0])
    assert scores.tolist() == [[4.0 / 2.0 - 1.0, 0.0]]


def test_only_the_rows_named_change_each_by_its_own_penalty() -> None:
    before = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    scores = before.clone()
    counts = [counts_of([1, 2, 2]), counts_of([5])]
    penalize_(scores, [1, 3], counts, [1.5, 1.0], [0.0, 2.0])
    assert torch.equal(scores[[0, 2]], before[[0, 2]])
    assert torch.equal(scores[1] != before[1], torch.tensor([i in (1, 2) for i in range(10)]))
    assert torch.equal(scores[3] != before[3], torch.tensor([i == 5 for i in range(10)]))
    assert scores[3, 5] == before[3, 5] - 2.0


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 5))
def test_counts_leave_out_the_beginning_they_are_told_to(token_ids: list[int], start: int) -> None:
    counts = TokenCounts(start)
    if len(token_ids) >= start:
        counts.update(token_ids)
        assert dict(zip(counts.token_ids, counts.counts, strict=True)) == Counter(token_ids[start:])
        assert counts.num_tokens == len(token_ids) - start


def test_output_penalties_subtract_by_count_and_once() -> None:
    scores = torch.zeros(3, 4)
    penalize_output_(scores, [0, 2], [counts_of([1, 1, 3]), counts_of([])], [0.5, 2.0], [0.25, 2.0])
    assert scores.tolist() == [[0.0, -1.25, 0.0, -0.75], [0.0] * 4, [0.0] * 4]


def test_counting_looks_at_new_tokens_only() -> None:
    class Tokens(list[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("this walks over the whole sequence")

    counts, tokens = TokenCounts(), Tokens([3, 3, 4])
    counts.update(tokens)
    tokens.append(4)
    counts.update(tokens)
    assert dict(zip(counts.token_ids, counts.counts, strict=True)) == {3: 2, 4: 2}
