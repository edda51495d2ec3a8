"""Draws counter-based random numbers by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011).

A number depends on its key and counter alone, so a request that was preempted, resumed or moved to another engine
draws the numbers it would have drawn, and requests of one batch never influence each other.
"""

import enum

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class Purpose(enum.IntEnum):
    """Says what a number is drawn for, so that numbers of one request and index are not correlated between purposes."""

    SAMPLE = 0
    DRAFT = 1
    """Of a draft model, where rejection sampling verifies its drafts."""
    ACCEPT = 2
    """Decides whether rejection sampling accepts a draft."""
    RESIDUAL = 3
    """Of the token that rejection sampling draws in place of a draft."""


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Run ten rounds over 32-bit words held in uint64: counter [4, n], key [2, n] → [4, n]."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = (product1 >> _WORD) ^ x1 ^ k0, product1 & _LOW
        x2, x3 = (product0 >> _WORD) ^ x3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([x0, x1, x2, x3])


def uniform(
    seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.uint64], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """Return [n] uniform float64 numbers in [0, 1) with 53 random bits, for n pairs (seed, output index)."""
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0], counter[1] = output_indices & _LOW, output_indices >> _WORD
    counter[2] = purpose
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _WORD]))
    # 53 bits, all that a float64 below 1 can hold: with fewer, tokens of a probability below the step would never be
    # drawn.
    bits: npt.NDArray[np.uint64] = (words[1] << _WORD | words[0]) >> np.uint64(11)
    return np.multiply(bits, 2.0**-53, dtype=np.float64)
