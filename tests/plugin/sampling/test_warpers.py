"""Warpers, against those of transformers as a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pagedkv.plugin.sampling.warpers import divide_by_temperature_, keep_min_p_, keep_top_k_, keep_top_p_, keep_typical_

NO_IDS = torch.empty(0, 0, dtype=torch.int64)
SHAPES = {"tiny": (4, 5), "small": (4, 300), "one sort": (3, 4096), "all candidate sizes": (3, 5000)}


def make_scores(shape: tuple[int, int], spread: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * spread


def kept(scores: torch.Tensor) -> torch.Tensor:
    return scores != -torch.inf


def expect_as_reference(scores: torch.Tensor, ours: torch.Tensor, references: list[torch.Tensor]) -> None:
    """Kept are the same tokens, and what is kept is as it was."""
    torch.testing.assert_close(kept(ours), kept(torch.stack(references)), rtol=0, atol=0)
    torch.testing.assert_close(ours[kept(ours)], scores[kept(ours)], rtol=0, atol=0)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_top_k(shape: tuple[int, int], spread: float) -> None:
    scores = make_scores(shape, spread)
    top_k = [1, 3, 50, 2**32 - 1][: shape[0]]
    ours = scores.clone()
    keep_top_k_(ours, top_k)
    reference = [TopKLogitsWarper(k)(NO_IDS, row[None])[0] for k, row in zip(top_k, scores, strict=True)]
    expect_as_reference(scores, ours, reference)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_min_p(shape: tuple[int, int], spread: float) -> None:
    scores = make_scores(shape, spread)
    min_p = [0.01, 0.3, 0.99, 1.0][: shape[0]]
    ours = scores.clone()
    keep_min_p_(ours, min_p)
    reference = [MinPLogitsWarper(p)(NO_IDS, row[None])[0] for p, row in zip(min_p, scores, strict=True)]
    expect_as_reference(scores, ours, reference)


def test_top_k_keeps_what_ties_with_the_last_one() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    keep_top_k_(scores, [2])
    assert kept(scores).tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize(
    ("warper_", "reference_type"), [(keep_top_p_, TopPLogitsWarper), (keep_typical_, TypicalLogitsWarper)]
)
def test_top_p_and_typical_p(
    warper_: Callable[[torch.Tensor, Sequence[float]], None],
    reference_type: type[TopPLogitsWarper] | type[TypicalLogitsWarper],
    shape: tuple[int, int],
    spread: float,
    mass: float,
) -> None:
    """In float64 the same tokens to the last one; in float32 rounding may move the last one by a few of nearly equal
    rank."""
    scores = make_scores(shape, spread).double()
    references = list(reference_type(mass)(NO_IDS, scores))
    exact, rounded = scores.clone(), scores.float()
    warper_(exact, [mass] * len(scores))
    expect_as_reference(scores, exact, references)
    warper_(rounded, [mass] * len(scores))
    assert (kept(rounded) != kept(torch.stack(references))).sum(-1).max() <= 4


def test_every_row_has_its_own_value() -> None:
    """Rows that need few, many and all tokens in one call give what each gives alone."""
    scores = make_scores((4, 5000), 3.0)
    for warper_, values in [(keep_top_p_, [0.1, 0.999, 0.5, 0.99]), (keep_typical_, [0.99, 0.1, 0.999, 0.5])]:
        together = scores.clone()
        warper_(together, values)
        for i, value in enumerate(values):
            alone = scores[i : i + 1].clone()
            warper_(alone, [value])
            assert torch.equal(together[i : i + 1], alone)


def test_top_p_keeps_what_ties_with_the_last_one() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, -9.0]])
    keep_top_p_(scores, [0.6])
    assert kept(scores).tolist() == [[True, True, True, True, False]]


def test_warpers_run_on_what_others_have_cut() -> None:
    scores = make_scores((3, 600), 1.0)
    ours = scores.clone()
    keep_top_k_(ours, [20] * 3)
    keep_top_p_(ours, [0.8] * 3)
    keep_typical_(ours, [0.7] * 3)
    reference = scores.double()
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.8), TypicalLogitsWarper(0.7)):
        reference = warper(NO_IDS, reference)
    expect_as_reference(scores, ours, list(reference))
    assert 0 < kept(ours).sum() < 60


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 1.5, 100.0])
def test_temperature_gives_the_reference_s_probabilities(temperature: float) -> None:
    scores = make_scores((3, 500), 4.0)
    ours = scores.clone()
    divide_by_temperature_(ours, [temperature] * 3)
    reference = TemperatureLogitsWarper(temperature)(NO_IDS, scores.double())
    torch.testing.assert_close(ours.double().softmax(-1), reference.softmax(-1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("temperature", "is_flat"), [(1e-300, False), (1e-40, False), (1e38, True), (1e300, True)])
def test_extreme_temperatures_stay_numbers(temperature: float, is_flat: bool) -> None:
    scores = torch.tensor([[300.0, -torch.inf, 301.0, -200.0]])
    divide_by_temperature_(scores, [temperature])
    expected = [[1 / 3, 0, 1 / 3, 1 / 3]] if is_flat else [[0, 0, 1, 0]]
    torch.testing.assert_close(scores.softmax(-1), torch.tensor(expected, dtype=torch.float32))
