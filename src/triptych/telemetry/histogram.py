"""How often a quantity had which size: fixed buckets, counted up from a start."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

# Upper bounds of buckets, inclusive, as Prometheus has them.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
SIZES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0)
TOKENS = tuple(float(1 << exponent) for exponent in range(16))
BYTES = tuple(float(1 << exponent) for exponent in range(6, 28, 2))


class Histogram(msgspec.Struct):
    """`counts` has one entry for each of the `bounds`, not cumulated, and one for what is above all of them."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0  # of the values

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: Histogram) -> Histogram:
        """Raises ValueError for other bounds."""
        if self.bounds != other.bounds:
            raise ValueError(f"a histogram of {self.bounds} and one of {other.bounds} cannot be added")
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)
