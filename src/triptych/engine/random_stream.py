"""Random numbers as a pure function of (seed, stream, position).

There is no generator state to save, share or advance: a request draws the same numbers alone, in any batch, after a
preemption and on any replica. The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC11), keyed by the seed; its counter holds the position and the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# One stream per kind of draw, so that no draw of a request shares a number with another.
TEXT = 0
CODEBOOK0 = 1

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # what each round adds to the key
_LOW = np.uint64(0xFFFFFFFF)
_NONE = np.iinfo(np.int64).min  # no block: not even that of a negative position
_32 = np.uint64(32)
_ROUNDS = np.arange(10, dtype=np.uint64)

Words = npt.NDArray[np.uint64]  # 32-bit words, each in an element of 64 bits so that products keep their high half
Uniforms = npt.NDArray[np.float64]


def residual(codebook: int) -> int:
    """The stream of residual codebook 1, 2, ... Raises ValueError below 1 (codebook 0 has CODEBOOK0)."""
    if codebook < 1:
        raise ValueError(f"residual codebooks are numbered from 1, not {codebook}")
    return CODEBOOK0 + codebook


def seed_bits(seed: int) -> int:
    """Any signed or unsigned 64-bit seed as its 64 bits."""
    return seed & 0xFFFFFFFFFFFFFFFF


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 over arrays that broadcast together: four counter words and two key words give four words."""
    c0, c1, c2, c3 = counter
    keys0, keys1 = ((np.add.outer(_ROUNDS * step, word)) & _LOW for step, word in zip(_WEYL, key, strict=True))
    for k0, k1 in zip(keys0, keys1, strict=True):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _LOW, (left >> _32) ^ c3 ^ k1, left & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: npt.ArrayLike, stream: npt.ArrayLike, positions: npt.ArrayLike) -> Uniforms:
    """float64 in [0, 1) with 53 random bits for each (seed, stream, position); the arguments broadcast together.

    `seeds` are 64 bits unsigned (see `seed_bits`), streams and positions are not negative (ValueError).
    """
    where = np.asarray(positions, dtype=np.int64)
    if where.size and int(where.min()) < 0:
        raise ValueError(f"positions count from 0, got {int(where.min())}")
    even, odd = _pair(np.asarray(seeds, dtype=np.uint64), np.asarray(stream, dtype=np.uint64), where >> 1)
    return np.asarray(np.where(where & 1, odd, even))


def _pair(seeds: Words, streams: Words, pairs: npt.NDArray[np.int64]) -> tuple[Uniforms, Uniforms]:
    """The numbers at positions 2 * pair and 2 * pair + 1: one Philox call yields the bits of two."""
    count = pairs.astype(np.uint64)
    zero = np.uint64(0)
    words = philox((count & _LOW, count >> _32, streams, np.asarray(zero)), (seeds & _LOW, seeds >> _32))
    return _unit(words[0], words[1]), _unit(words[2], words[3])


def _unit(high: Words, low: Words) -> Uniforms:
    return ((high >> np.uint64(5)) * 67108864.0 + (low >> np.uint64(6))) * 2.0**-53


class UniformBlocks:
    """The numbers of several streams, computed `length` positions ahead for each slot, so that a step only indexes.

    A cache and nothing more: `take` gives what `uniforms` gives for the slot's seed.
    """

    def __init__(self, num_slots: int, streams: Sequence[int], length: int = 128) -> None:
        if length < 2 or length % 2:
            raise ValueError(f"length must be even and at least 2, not {length}")
        self._streams = np.asarray(streams, dtype=np.uint64)
        self._length = length
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._block = np.full(num_slots, _NONE, dtype=np.int64)  # which block of positions a slot holds
        self._values = np.empty((num_slots, length, len(streams)), dtype=np.float64)

    def admit(self, slot: int, seed: int) -> None:
        """Give `slot` to a request with this seed."""
        self._seeds[slot] = seed_bits(seed)
        self._block[slot] = _NONE

    def take(self, slots: Sequence[int], positions: Sequence[int]) -> Uniforms:
        """[B, number of streams]: the numbers of slots[i] at positions[i]. A slot comes at most once in a call.

        Raises ValueError for a negative position.
        """
        rows = np.asarray(slots, dtype=np.int64)
        block, offset = np.divmod(np.asarray(positions, dtype=np.int64), self._length)
        stale = np.nonzero(self._block[rows] != block)[0]
        if stale.size:
            self._fill(rows[stale], block[stale])
        return self._values[rows, offset]

    def _fill(self, rows: npt.NDArray[np.int64], block: npt.NDArray[np.int64]) -> None:
        if int(block.min()) < 0:
            raise ValueError("positions count from 0, got a negative one")
        half = self._length // 2
        pairs = block[:, None, None] * half + np.arange(half)[:, None]
        even, odd = _pair(self._seeds[rows, None, None], self._streams, pairs)
        self._values[rows, 0::2] = even
        self._values[rows, 1::2] = odd
        self._block[rows] = block
