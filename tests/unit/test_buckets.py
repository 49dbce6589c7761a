"""The shapes that steps are recorded for."""

from __future__ import annotations

import pytest

from triptych.engine.buckets import DecodeBuckets, decode_buckets, growing, smallest
from triptych.stages.cadence import Cadence


@pytest.mark.parametrize(
    ("first", "last", "factor", "sizes"),
    [(4, 4, 2, [4]), (4, 36, 2, [4, 8, 16, 32, 36]), (1, 8, 2, [1, 2, 4, 8]), (16, 2048, 4, [16, 64, 256, 1024, 2048])],
)
def test_sizes_grow_up_to_the_last(first: int, last: int, factor: int, sizes: list[int]) -> None:
    assert growing(first, last, factor) == sizes


@pytest.mark.parametrize("rows", range(1, 38))
@pytest.mark.parametrize("blocks", [1, 16, 17, 100])
def test_every_step_that_a_deploy_config_allows_has_a_shape(rows: int, blocks: int) -> None:
    buckets = decode_buckets(max_rows=37, row_tile=4, max_blocks=100)
    wide, long = buckets.fit(rows, blocks)
    assert rows <= wide <= 40 and wide % 4 == 0
    assert blocks <= long <= 100
    assert (wide, long) in buckets.largest_first()


def test_a_shape_whose_memory_is_too_much_is_not_recorded() -> None:
    buckets = decode_buckets(max_rows=8, row_tile=4, max_blocks=64, most=256)
    assert buckets.largest_first() == [(4, 64), (8, 16), (4, 16)]
    assert (buckets.fit(3, 60), buckets.fit(5, 60), buckets.fit(5, 10)) == ((4, 64), None, (8, 16))


def test_a_short_context_has_one_table() -> None:
    assert decode_buckets(max_rows=3, row_tile=1, max_blocks=5) == DecodeBuckets((1, 2, 3), (5,))


def test_the_largest_shape_is_recorded_first() -> None:
    sizes = [rows * blocks for rows, blocks in decode_buckets(max_rows=9, row_tile=4, max_blocks=40).largest_first()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 12 * 40


def test_more_than_was_recorded_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="9 is more than the largest recorded size, 8"):
        smallest((4, 8), 9)


@pytest.mark.parametrize("cadence", [Cadence(1, 1), Cadence(2, 25), Cadence(4, 25), Cadence(25, 25), Cadence(1, 8)])
def test_later_sizes_are_those_that_a_long_stream_has(cadence: Cadence) -> None:
    start, seen = cadence.initial, set()
    while start < 4000:
        seen.add(cadence.size(start))
        start += cadence.size(start)
    assert cadence.later_sizes() == sorted(seen)
