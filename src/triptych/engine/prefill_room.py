"""How many rows of a step prefills may have, beside the decode rows that have to be in time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from operator import attrgetter

from triptych.engine.request import EngineRequest

serving_order = attrgetter("due_at", "arrival")  # who is due first is served first, then by arrival


@dataclass(slots=True)
class PrefillRoom:
    """What a step has left for prefill pieces: the token budget, and of it `spare` rows for those that are served after
    the decode row that is due first."""

    budget: int
    spare: int
    first: tuple[float, int] = (inf, 0)  # the place of that decode row

    def of(self, request: EngineRequest) -> int:
        return min(self.budget, self.spare) if serving_order(request) > self.first else self.budget

    def take(self, request: EngineRequest, num_rows: int, *, cut: bool) -> None:
        """A piece that is cut leaves nothing to those that are served under the same limit: none overtakes it."""
        self.spare = 0 if cut else self.spare - num_rows
        self.budget = 0 if cut and serving_order(request) <= self.first else self.budget - num_rows
