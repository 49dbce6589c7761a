"""The shapes for which steps are recorded, and which of them a step takes. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

_LEAST_BLOCKS = 16  # of KV cache a row; a narrower table would save less than its recordings take


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """Numbers of decode rows, and of KV blocks that each of them may look at, both ascending."""

    rows: tuple[int, ...]
    blocks: tuple[int, ...]

    def fit(self, rows: int, blocks: int) -> tuple[int, int]:
        """The smallest shape that holds `rows` rows of `blocks` blocks. Raises ValueError where none does."""
        return smallest(self.rows, rows), smallest(self.blocks, blocks)

    def largest_first(self) -> list[tuple[int, int]]:
        return sorted(product(self.rows, self.blocks), key=lambda shape: shape[0] * shape[1], reverse=True)


def decode_buckets(*, max_rows: int, row_tile: int, max_blocks: int) -> DecodeBuckets:
    """Rows double from a tile up; tables grow fourfold, as blocks that no row looks at cost their reading alone."""
    return DecodeBuckets(
        tuple(growing(row_tile, -(-max_rows // row_tile) * row_tile, 2)),
        tuple(growing(min(_LEAST_BLOCKS, max_blocks), max_blocks, 4)),
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
