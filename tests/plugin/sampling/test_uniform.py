"""Random numbers as a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.plugin.sampling.uniform import philox_4x32, uniforms

BIG = 2**64 - 1

# Known answers of the authors' library, Random123: counter, key, output.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def chi_square_of_uniformity(values: np.ndarray, num_bins: int = 50) -> float:
    """In standard deviations above its mean."""
    counts = np.histogram(values, bins=num_bins, range=(0, 1))[0]
    expected = len(values) / num_bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1)))


def test_philox_gives_the_known_answers_side_by_side() -> None:
    counters, keys, outputs = (np.array(part, dtype=np.uint64).T for part in zip(*KNOWN_ANSWERS, strict=True))
    np.testing.assert_array_equal(philox_4x32(counters, keys), outputs)


def test_seed_and_step_are_key_and_counter() -> None:
    """Both 64 bits of each take part, low word first."""
    low, high = 0x89ABCDEF, 0x01234567
    words = philox_4x32(np.array([[low], [high], [0], [0]], np.uint64), np.array([[high], [low]], np.uint64))
    expected = ((int(words[0, 0]) << 32 | int(words[1, 0])) >> 11) / 2**53
    assert uniforms([low << 32 | high], [high << 32 | low])[0] == expected


def test_equal_pairs_give_equal_numbers_whatever_is_beside_them() -> None:
    alone = [uniforms([seed], [step])[0] for seed, step in [(0, 0), (BIG, 7), (3, BIG)]]
    assert uniforms([0, BIG, 3], [0, 7, BIG]).tolist() == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32, 2**63, BIG])
def test_steps_of_one_seed_are_uniform_and_uncorrelated(seed: int) -> None:
    values = uniforms([seed] * 20_000, np.arange(20_000))
    assert values.min() >= 0
    assert values.max() < 1
    assert chi_square_of_uniformity(values) < 4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(20_000)


@pytest.mark.parametrize("step", [0, 1, 1000])
@pytest.mark.parametrize("first_seed", [0, 2**64 - 20_000])
def test_neighbouring_seeds_are_uniform_and_uncorrelated(first_seed: int, step: int) -> None:
    values = uniforms(np.uint64(first_seed) + np.arange(20_000, dtype=np.uint64), [step] * 20_000)
    assert chi_square_of_uniformity(values) < 4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(20_000)


def test_streams_of_neighbouring_seeds_don_t_meet() -> None:
    """No stream is another one shifted, as it would be if seed and step were added up."""
    streams = uniforms(np.repeat(np.arange(64), 64), np.tile(np.arange(64), 64))
    assert len(set(streams.tolist())) == 64 * 64
