"""The shapes for which steps are recorded, and which of them a step takes. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

_LEAST_BLOCKS = 16  # of KV cache a row; a narrower table would save less than its recordings take


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """Numbers of decode rows, and of KV blocks that each of them may look at, both ascending.

    Only shapes of at most `most` blocks in all are recorded, any where it is None: the memory of the largest is held.
    """

    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    most: int | None = None

    def fit(self, rows: int, blocks: int) -> tuple[int, int] | None:
        """The smallest shape that holds `rows` rows of `blocks` blocks, None where that is not recorded.

        Raises ValueError for more than the deploy config allows.
        """
        shape = smallest(self.rows, rows), smallest(self.blocks, blocks)
        return shape if self._is_recorded(shape) else None

    def largest_first(self) -> list[tuple[int, int]]:
        """Every shape that is recorded."""
        shapes = filter(self._is_recorded, product(self.rows, self.blocks))
        return sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)

    def _is_recorded(self, shape: tuple[int, int]) -> bool:
        return self.most is None or shape[0] * shape[1] <= self.most


def decode_buckets(*, max_rows: int, row_tile: int, max_blocks: int, most: int | None = None) -> DecodeBuckets:
    """Rows double from a tile up; tables grow fourfold, as blocks that no row looks at cost their reading alone."""
    return DecodeBuckets(
        tuple(growing(row_tile, -(-max_rows // row_tile) * row_tile, 2)),
        tuple(growing(min(_LEAST_BLOCKS, max_blocks), max_blocks, 4)),
        most,
    )


def growing(first: int, last: int, factor: int) -> list[int]:
    """`first`, and on by `factor`, up to `last`, which is the last one."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, sizes[-1] * factor))
    return sizes


def smallest(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of the ascending `sizes` that is at least `wanted`. Raises ValueError where none is."""
    place = bisect_left(sizes, wanted)
    if place == len(sizes):
        raise ValueError(f"{wanted} is more than the largest recorded size, {sizes[-1]}")
    return sizes[place]
