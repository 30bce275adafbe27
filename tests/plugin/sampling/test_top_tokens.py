"""The model's own best tokens."""

from __future__ import annotations

import pytest
import torch

from pagedkv.plugin.sampling.top_tokens import find_top_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_best_first_with_their_log_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logprobs = logits.double().log_softmax(-1)
    nums = [1, 5, 2, 20, 300]
    for row, num, found in zip(logprobs, nums, find_top_tokens(logits, nums), strict=True):
        worst = row.sort(descending=True).values[num - 1]
        expected = sorted((-row[i].item(), i) for i in range(300) if row[i] >= worst)
        assert [token.token_id for token in found] == [i for _, i in expected]
        assert [token.logprob for token in found] == pytest.approx([-p for p, _ in expected], abs=1e-5)


def test_ties_with_the_last_one_are_included_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    found = find_top_tokens(logits, [3, 2])
    assert [token.token_id for token in found[0]] == [1, 3, 2, 4, 5]
    assert [token.token_id for token in found[1]] == [0, 1]


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    [found] = find_top_tokens(torch.tensor([[1.0, 3.0, 2.0]]), [1000])
    assert [token.token_id for token in found] == [1, 2, 0]


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [torch.nan, 1.0, 2.0], [3.0, 1.0, 2.0]])
    found = find_top_tokens(logits, [1, 1, 1])
    assert [token.token_id for token in found[0] + found[2]] == [1, 0]
