"""An order of a dataset that any process computes for any place of it, without a list of all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FEISTEL_ROUNDS = 4
"""Luby and Rackoff: four rounds of good mixing make a permutation that looks random."""


def splitmix64(values: Words) -> Words:
    """Mix each 64-bit value: the finalizer of Steele, Lea and Flood, "Fast splittable PRNGs"."""
    mixed = values + _GOLDEN  # arrays of unsigned integers wrap, which is what is meant
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def key_of(seed: int) -> Words:
    """Return a seed as one mixed word: neighbouring seeds have nothing in common."""
    return splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64))


def shuffled(places: npt.NDArray[np.int64], num_samples: int, key: Words) -> npt.NDArray[np.int64]:
    """Return which sample stands at each place: a permutation of [0, num_samples) that `key` names.

    A Feistel network on the smallest even number of bits that holds `num_samples`; what comes out
    beyond it goes in again, so that exactly the numbers below remain.

    Args:
        places: shape (n,), in [0, num_samples).
        num_samples: of the dataset.
        key: one word, as of `key_of`.
    """
    half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    found = _permuted(places.astype(np.uint64), half_bits, key)
    while (outside := found >= num_samples).any():
        found[outside] = _permuted(found[outside], half_bits, key)
    return found.astype(np.int64)


def _permuted(values: Words, half_bits: np.uint64, key: Words) -> Words:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for index in range(_FEISTEL_ROUNDS):
        mixed = splitmix64(right ^ splitmix64(key + np.uint64(index)))
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
