"""What the processes that play some stages one after the other have counted together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from triptych.config.schema import StageKind
from triptych.connectors.wire import StageStats


class StageTotals:
    """A process counts from nothing; with what those before it had counted by their last heartbeat, no count falls.

    Gauges are those of the process that lives, and zero while none does.
    """

    def __init__(self) -> None:
        self._past: dict[StageKind, StageStats] = {}
        self._current: dict[StageKind, StageStats] = {}

    def heard(self, stages: Iterable[StageStats]) -> None:
        """A heartbeat of the process that lives."""
        self._current = {stats.stage: stats for stats in stages}

    def ended(self) -> None:
        """The process is gone, and what it has counted is past. Idempotent, so nothing counts twice."""
        self._past = {
            kind: StageStats(stage=kind, replica=total.replica, counts=total.counts)
            for kind, total in self.stats().items()
        }
        self._current = {}

    def stats(self) -> dict[StageKind, StageStats]:
        totals = self._past | self._current
        for kind in self._past.keys() & self._current.keys():
            counts = self._past[kind].counts + self._current[kind].counts
            totals[kind] = msgspec.structs.replace(self._current[kind], counts=counts)
        return totals
