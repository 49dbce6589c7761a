"""The random stream is Philox4x32-10, a pure function of (seed, stream, position)."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.engine.random_stream import CODEBOOK0, TEXT, UniformBlocks, philox, residual, seed_bits, uniforms

MASK = 0xFFFFFFFF

# The published known answers of philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def slow_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's algorithm, one word at a time."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK, (left >> 32) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def slow_uniform(seed: int, stream: int, position: int) -> float:
    pair = position // 2
    words = slow_philox((pair & MASK, pair >> 32, stream, 0), (seed & MASK, seed >> 32))
    high, low = words[2:] if position % 2 else words[:2]
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.asarray([word], dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray([word], dtype=np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected
    assert slow_philox(counter, key) == expected


def test_uniforms_equal_the_scalar_reference_over_the_whole_range() -> None:
    rng = np.random.default_rng(0)
    seeds = [0, 1, 2**32, 2**64 - 1, *rng.integers(0, 2**63, 60).tolist()]
    streams = [TEXT, CODEBOOK0, residual(15), *rng.integers(0, 17, 61).tolist()]
    positions = [0, 1, 2, 2**33 + 1, *rng.integers(0, 2**40, 60).tolist()]
    fast = uniforms(np.asarray(seeds, dtype=np.uint64), streams, positions)
    assert fast.tolist() == [slow_uniform(*args) for args in zip(seeds, streams, positions, strict=True)]


def test_a_number_does_not_depend_on_the_batch_it_is_drawn_in() -> None:
    seeds = np.arange(1000, dtype=np.uint64) * 7
    together = uniforms(seeds, TEXT, np.arange(1000))
    for i in (0, 1, 500, 999):
        assert float(uniforms(int(seeds[i]), TEXT, i)) == together[i]


def test_a_negative_seed_is_its_64_bits() -> None:
    assert seed_bits(-1) == 2**64 - 1
    assert seed_bits(5) == 5
    assert float(uniforms(seed_bits(-1), TEXT, 0)) == slow_uniform(2**64 - 1, TEXT, 0)


def test_numbers_are_uniform_and_in_the_half_open_interval() -> None:
    values = uniforms(np.arange(200, dtype=np.uint64)[:, None], CODEBOOK0, np.arange(1000))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=100, range=(0.0, 1.0))[0]
    chi2 = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert 50 < chi2 < 160  # 99 degrees of freedom: 99 +- 14


def test_seeds_streams_and_positions_are_independent() -> None:
    grid = uniforms(np.arange(64, dtype=np.uint64)[:, None, None], np.arange(17)[None, :, None], np.arange(128))
    assert np.unique(grid).size == grid.size
    for axis in range(3):
        left, right = (np.delete(grid, index, axis).ravel() for index in (0, -1))  # neighbours along the axis
        assert abs(float(np.corrcoef(left, right)[0, 1])) < 0.012  # 4 standard deviations of 1 / sqrt(n)


def test_streams_of_a_request_are_distinct() -> None:
    streams = [TEXT, CODEBOOK0, *(residual(k) for k in range(1, 16))]
    assert len(set(streams)) == 17
    with pytest.raises(ValueError, match="numbered from 1, not 0"):
        residual(0)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="count from 0, got -3"):
        uniforms(1, TEXT, [4, -3])
    with pytest.raises(ValueError, match="count from 0"):
        UniformBlocks(1, [TEXT]).take([0], [-1])


@pytest.mark.parametrize("length", [2, 64])
def test_blocks_give_what_uniforms_gives_in_any_order_of_positions(length: int) -> None:
    rng = np.random.default_rng(1)
    streams = [CODEBOOK0, *(residual(k) for k in range(1, 16))]
    blocks = UniformBlocks(8, streams, length)
    seeds = [-(2**63), 2**64 - 1, *range(6)]
    for slot, seed in enumerate(seeds):
        blocks.admit(slot, seed)
    positions = rng.integers(0, 300, 8)
    for step in range(300):
        slots = rng.permutation(8)[: 1 + step % 8]
        at = [int(positions[slot]) for slot in slots]
        expected = [uniforms(seed_bits(seeds[slot]), streams, p) for slot, p in zip(slots, at, strict=True)]
        assert np.array_equal(blocks.take(slots.tolist(), at), np.stack(expected))
        positions[slots] += 1
        if step % 50 == 49:  # a new request takes the slot, at a position that the old block would cover
            seeds[0] = step
            blocks.admit(0, step)
