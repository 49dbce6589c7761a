"""What a stage took for what it made, between two looks at its counts, and what linear growth would have taken.

A token is a text token of the Thinker, or a codec frame of Talker and Code2Wav.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from triptych.bench.ceilings import Ceilings
from triptych.bench.roofline import Scrape

PARTS = ("beginning", "middle", "end")
LEAST_MARKS = 7  # looks that a stretch is cut in parts with: about two in each


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` that a stage was stepping for `tokens`, and the work of its steps as the roofline counts it."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    moved_bytes: float = 0.0
    flops: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens

    def __sub__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) - getattr(other, name) for name in Cost.__struct_fields__})

    def towards(self, other: Cost, share: float) -> Cost:
        """What lies that share of the way on to `other`."""
        step = other - self
        return Cost(**{name: getattr(self, name) + share * getattr(step, name) for name in Cost.__struct_fields__})


def costs(scrape: Scrape) -> dict[str, Cost]:
    """By stage, over its replicas, since the start of the server."""
    found: dict[str, Cost] = {}
    for (stage, _), counted in scrape.items():
        so_far = found.get(stage, Cost())
        found[stage] = Cost(
            steps=so_far.steps + counted.steps,
            seconds=so_far.seconds + counted.step_s,
            tokens=so_far.tokens + counted.tokens,
            moved_bytes=so_far.moved_bytes + counted.moved_bytes,
            flops=so_far.flops + counted.flops,
        )
    return found


def spent(scrapes: Sequence[Scrape]) -> dict[str, Cost]:
    """By stage, from the first look to the last; without the stages that made nothing."""
    before, after = costs(scrapes[0]), costs(scrapes[-1])
    found = {stage: cost - before.get(stage, Cost()) for stage, cost in after.items()}
    return {stage: cost for stage, cost in found.items() if cost.steps and cost.tokens}


def parts(looks: Iterable[Mapping[str, Cost]], stage: str) -> tuple[Cost, ...] | None:
    """What a stage took for each third of its tokens; None where too few looks fell into the time that it took."""
    marks: list[Cost] = []
    for look in looks:
        cost = look.get(stage, Cost())
        if not marks or cost.tokens > marks[-1].tokens:
            marks.append(cost)
    if len(marks) < LEAST_MARKS:
        return None
    first, whole = marks[0].tokens, marks[-1].tokens - marks[0].tokens
    cuts = [_at(marks, first + whole * index / len(PARTS)) for index in range(len(PARTS) + 1)]
    return tuple(later - earlier for earlier, later in pairwise(cuts))


def _at(marks: Sequence[Cost], tokens: float) -> Cost:
    """Between the two looks that so many tokens lie between."""
    for earlier, later in pairwise(marks):
        if tokens <= later.tokens:
            return earlier.towards(later, (tokens - earlier.tokens) / (later.tokens - earlier.tokens))
    return marks[-1]


def of_linear(cost: Cost, lower: Sequence[Cost], most: Ceilings | None) -> float | None:
    """How many times what linear growth gives a token took. None without anything below to grow from.

    Linear is the least that a token took at any lower point, and what its steps had more to move or to compute, at the
    speed of the machine: keys and values of a longer past, so attention's own growth is none of a stage's.
    """
    if not lower:
        return None
    return cost.token_s / min(below.token_s + _more_work_s(cost, below, most) for below in lower)


def _more_work_s(cost: Cost, below: Cost, most: Ceilings | None) -> float:
    if most is None:
        return 0.0
    moved = cost.moved_bytes / cost.tokens - below.moved_bytes / below.tokens
    flops = cost.flops / cost.tokens - below.flops / below.tokens
    return max(0.0, moved / most.bytes_per_s, flops / most.flops_per_s)
