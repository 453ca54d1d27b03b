"""Pseudo-random order by arithmetic: hashes and bijections of integers, the same on every machine, for ever.

NumPy does not promise that a seeded `Generator` gives the same stream in the next release, and a permutation of a
billion windows takes eight gigabytes. A keyed bijection has neither problem: position `i` of the order is a function
of `(i, seed, epoch)`, so resuming is looking up the next number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ROUNDS = 6  # four make a Feistel network pseudo-random (Luby and Rackoff 1988); two more for tiny domains


def mix64(values: NDArray[np.generic], key: int = 0) -> U64:
    """A 64-bit hash of each integer of an array under `key`: the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""
    z = values.astype(np.uint64) + np.uint64((key * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key out of several integers of any size; the order of the parts matters."""
    key = 0
    for part in parts:
        while True:  # a seed may be longer than 64 bits
            key = int(mix64(np.array([part & _MASK], dtype=np.uint64), key)[0])
            part >>= 64
            if part <= 0:
                break
    return key


class Shuffle:
    """A keyed bijection of 0 … size-1: a Feistel network over the next power of two, cycle-walked into range."""

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"a shuffle needs at least one element, not {size}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low = np.uint64((1 << bits // 2) - 1)
        self._high = np.uint64((1 << bits - bits // 2) - 1)
        self._keys = [derive_key(*key, size, number) for number in range(_ROUNDS)]

    def __call__(self, positions: NDArray[np.generic]) -> NDArray[np.int64]:
        """The elements at `positions` [n] of the shuffled order, int64 [n]."""
        values = self._encrypt(np.asarray(positions).astype(np.uint64))
        outside = values >= np.uint64(self.size)
        while outside.any():  # less than half of the domain lies outside (three quarters at size 1): a few walks
            values[outside] = self._encrypt(values[outside])
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64)

    def _encrypt(self, values: U64) -> U64:
        high, low = values >> self._low_bits, values & self._low
        for even, odd in zip(self._keys[::2], self._keys[1::2]):
            high = high ^ (mix64(low, even) & self._high)
            low = low ^ (mix64(high, odd) & self._low)
        return (high << self._low_bits) | low
