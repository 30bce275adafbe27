"""Watermarks."""

from __future__ import annotations

import pytest
import torch

from pagedkv.plugin.sampling.watermark import Watermark


def test_green_list_is_the_seeded_permutation_s_beginning() -> None:
    for previous_id in (0, 7, 99):
        permutation = torch.randperm(100, generator=torch.Generator().manual_seed(15485863 * previous_id))
        assert torch.equal(Watermark(100, 0.5, 2.0).green_ids(previous_id), permutation[:50])


@pytest.mark.parametrize(("gamma", "delta"), [(0.5, 2.0), (0.25, 4.0)])
def test_green_scores_rise_by_delta_in_the_rows_named(gamma: float, delta: float) -> None:
    watermark = Watermark(100, gamma, delta)
    scores = torch.zeros(3, 100)
    watermark.favour_(scores, [0, 2], [5, 6])
    for row, previous_id in [(0, 5), (2, 6)]:
        expected = torch.zeros(100)
        expected[watermark.green_ids(previous_id)] = delta
        assert torch.equal(scores[row], expected)
        assert (scores[row] == delta).sum() == 100 * gamma
    assert not scores[1].any()
