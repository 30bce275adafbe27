"""Random numbers that are a function of seed and step alone: no generator state to keep, save or replay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_INCREMENTS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)
_32_BITS = np.uint64(32)


def philox_4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), many counters at once.

    Args:
        counters: [4, N], one 32-bit word each.
        keys: [2, N], one 32-bit word each.

    Returns:
        [4, N], one random 32-bit word each.
    """
    even, odd = counters[0::2], counters[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(_NUM_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products[::-1] >> _32_BITS) ^ odd ^ keys
        odd = products[::-1] & _LOW_32_BITS
        keys = (keys + _KEY_INCREMENTS) & _LOW_32_BITS
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: npt.ArrayLike, steps: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and step; equal pairs give equal numbers.

    Args:
        seeds: [N], 0 ≤ seed < 2**64: the key.
        steps: [N], 0 ≤ step < 2**64: the counter.

    Returns:
        [N], multiples of 2**-53.
    """
    keys = _words(seeds)
    steps_words = _words(steps)
    words = philox_4x32(np.concatenate([steps_words, np.zeros_like(steps_words)]), keys)
    bits = (words[0] << _32_BITS | words[1]) >> np.uint64(64 - 53)
    fractions: npt.NDArray[np.float64] = bits / 2**53
    return fractions


def _words(values: npt.ArrayLike) -> UInt64Array:
    """[N] 64-bit numbers as [2, N] words, the low one first."""
    wide = np.asarray(values, dtype=np.uint64)
    return np.stack([wide & _LOW_32_BITS, wide >> _32_BITS])
