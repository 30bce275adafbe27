"""Elements, scales and zero points: bounds of the error, what saturates, and blocks that fill token by token."""

from __future__ import annotations

import pytest
import torch

from pagedkv.kernels.quantization import (
    dequantize_channels,
    dequantize_groups,
    pack,
    quantize_channels,
    quantize_groups,
    quantize_tokens,
    rotate,
    round_to_elements,
    unpack,
)
from pagedkv.plugin.kv_dtypes import find_kv_dtype


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def channel_keys(generator: torch.Generator, num_tokens: int = 16) -> torch.Tensor:
    """[1, num_tokens, 2, 32] with channels of very different offset and range, as keys have."""
    offsets, ranges = (torch.randn(2, 32, generator=generator).exp2() for _ in range(2))
    return offsets * 8 + ranges * torch.randn(1, num_tokens, 2, 32, generator=generator)


def fill(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """What a block holds after steps that end at `ends`: each sees the tokens before it as they were stored."""
    numbers, codes = torch.full_like(x, torch.nan), torch.zeros(1, 2, 32, dtype=torch.int8)
    start = 0
    for end in ends:
        numbers[:, start:end] = x[:, start:end]
        stored = quantize_channels(numbers, torch.tensor([end]), codes, torch.tensor([start > 0]))
        numbers, codes = dequantize_channels(*stored), stored[2]
        start = end
    return numbers


@pytest.mark.parametrize(("name", "bound"), [("int8", 1 / 254), ("fp8_e4m3", 1 / 16), ("fp8_e5m2", 1 / 8)])
def test_a_scale_per_token_keeps_the_largest_magnitude_and_bounds_the_error(
    name: str, bound: float, generator: torch.Generator
) -> None:
    x = torch.randn(50, 64, generator=generator) * torch.logspace(-20, 20, 50)[:, None]
    elements, scales = quantize_tokens(x, find_kv_dtype(name))
    numbers = elements.float() * scales[:, None]
    absmax = x.abs().amax(-1, keepdim=True)
    assert ((numbers - x).abs() <= absmax * bound * 1.0001).all()
    torch.testing.assert_close(numbers.abs().amax(-1, keepdim=True), absmax, rtol=1e-6, atol=0)


def test_floats_choose_a_scale_that_is_better_than_the_largest_elements(generator: torch.Generator) -> None:
    x = torch.randn(300, 64, generator=generator)
    kv_dtype = find_kv_dtype("fp8_e4m3")
    elements, scales = quantize_tokens(x, kv_dtype)
    plain = x.abs().amax(-1, keepdim=True) / 448
    plain_error = (round_to_elements(x / plain, kv_dtype).float() * plain - x).square().sum()
    assert (elements.float() * scales[:, None] - x).square().sum() < 0.8 * plain_error


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_zeros_stay_zeros(name: str) -> None:
    x = torch.zeros(3, 70)
    if name == "int4":
        assert not dequantize_groups(*quantize_groups(x, 64), 64).any()
    else:
        elements, scales = quantize_tokens(x, find_kv_dtype(name))
        assert not (elements.float() * scales[:, None]).any()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_elements_saturate(name: str) -> None:
    kv_dtype = find_kv_dtype(name)
    elements = round_to_elements(torch.tensor([1e6, -1e6, torch.inf, -torch.inf]), kv_dtype).float()
    assert elements.tolist() == [kv_dtype.max_element, -kv_dtype.max_element] * 2


def test_a_broken_row_shows_in_its_scale_and_nowhere_else() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    _, scales = quantize_tokens(x, find_kv_dtype("int8"))
    assert scales.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 130])
def test_groups_are_at_least_as_good_as_rounding_in_their_own_range(dim: int, generator: torch.Generator) -> None:
    x = torch.randn(40, dim, generator=generator) + 3
    elements, codes, zeros = quantize_groups(x, 64)
    assert elements.max() <= 15
    assert codes.shape == zeros.shape == (40, -(-dim // 64))
    numbers = dequantize_groups(elements, codes, zeros, 64)
    for start in range(0, dim, 64):
        group, stored = x[:, start : start + 64], numbers[:, start : start + 64]
        fitting = torch.maximum((group.amax(-1) - group.amin(-1)) / 15, group.abs().amax(-1) / 112)
        # One of the scales tried is at most 2^(2/8) too wide and cuts nothing: half a step each.
        bound = (fitting * 2 ** (2 / 8) / 2).square() * group.shape[-1]
        assert ((stored - group).square().sum(-1) <= bound).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_parts_of_bytes_come_back(dim: int, bits: int, generator: torch.Generator) -> None:
    elements = torch.randint(0, 2**bits, (7, 3, dim), generator=generator, dtype=torch.uint8)
    packed = pack(elements, bits)
    assert packed.shape == (7, 3, -(-dim * bits // 8))
    assert torch.equal(unpack(packed, bits, dim), elements)


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (80, 16), (7, 1), (1, 1)])
def test_rotation_spreads_an_outlier_and_is_its_own_inverse(dim: int, size: int, generator: torch.Generator) -> None:
    """Over as many channels as the largest power of two that divides them."""
    x = torch.randn(5, 3, dim, generator=generator)
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotate(x)[2:3], rotate(x[2:3]))
    outlier = torch.zeros(dim)
    outlier[-1] = 1
    assert (rotate(outlier).abs() > 0).sum() == size
    torch.testing.assert_close(rotate(outlier).abs().max(), torch.tensor(size**-0.5))


def test_the_first_key_of_a_block_has_quarters_of_a_step(generator: torch.Generator) -> None:
    x = torch.rand(50, 16, 2, 32, generator=generator)
    known, codes = torch.full((50,), 16), torch.zeros(50, 2, 32, dtype=torch.int8)
    stored = quantize_channels(x, known, codes, torch.zeros(50, dtype=torch.bool))
    errors = (dequantize_channels(*stored) - x).abs().mean((0, 2, 3))
    assert errors[0] < errors[1:].min() / 2


def test_a_channel_has_its_own_range(generator: torch.Generator) -> None:
    """One channel that is 1000 times as large as the others does not cost them precision."""
    x = channel_keys(generator)
    plain = fill(x, [16])
    x[..., 3] *= 1000
    torch.testing.assert_close(
        torch.cat([fill(x, [16])[..., :3], fill(x, [16])[..., 4:]], -1),
        torch.cat([plain[..., :3], plain[..., 4:]], -1),
        rtol=0,
        atol=0,
    )


def test_a_block_that_fills_token_by_token_stays_near_one_stored_at_once(generator: torch.Generator) -> None:
    errors = {"at once": 0.0, "in steps": 0.0, "by token": 0.0}
    for _ in range(20):
        x = channel_keys(generator)
        ranges = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
        for name, ends in (("at once", [16]), ("in steps", [7, 16]), ("by token", list(range(1, 17)))):
            errors[name] += float(((fill(x, ends) - x) / ranges).square().mean())
    assert errors["in steps"] < 1.5 * errors["at once"]
    assert errors["by token"] < 2 * errors["at once"]


def test_a_token_in_the_range_of_the_block_changes_no_other() -> None:
    x = torch.linspace(-1, 1, 16).view(1, 16, 1, 1).repeat(1, 1, 2, 32)
    before = fill(x, [15])
    x[:, 15] = before[:, 4]
    assert torch.equal(fill(x, [15, 16])[:, :15], before[:, :15])


def test_what_stood_in_a_block_before_has_no_influence(generator: torch.Generator) -> None:
    x = channel_keys(generator)
    clean = quantize_channels(x, torch.tensor([5]), torch.zeros(1, 2, 32, dtype=torch.int8), torch.tensor([False]))
    dirty = x.clone()
    dirty[:, 5:] = torch.nan
    other = torch.full((1, 2, 32), 99, dtype=torch.int8)
    again = quantize_channels(dirty, torch.tensor([5]), other, torch.tensor([False]))
    for one, two in zip(clean, again, strict=True):
        assert torch.equal(one, two)
