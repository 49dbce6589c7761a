"""How one request went in one stage, for whoever wants to know: the server's traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triptych.config.schema import StageKind
from triptych.telemetry.stage_times import StageTimes

Outcome = Literal["finished", "failed", "aborted"]  # as `/metrics` counts them, by stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """Instants are of this process's event loop: the stage has told how long ago each was, so they are late by what its
    last message took to get here, and no clock of another machine is asked.

    `num_tokens` are text tokens of the Thinker, codec frames of the others, as far as the server has heard of them.
    `finish_reason` is None for Code2Wav, and for a stage that was not `finished`.
    """

    stage: StageKind
    replica: int
    outcome: Outcome
    announced: float
    ended: float
    times: StageTimes
    num_tokens: int
    finish_reason: str | None = None

    @property
    def ready(self) -> float | None:
        """When the request had what it needs to begin."""
        return self._instant(self.times.ready)

    @property
    def started(self) -> float | None:
        """When its first step began."""
        return self._instant(self.times.started)

    @property
    def first(self) -> float | None:
        """When its first token, frame or chunk was there."""
        return self._instant(self.times.first)

    def _instant(self, ago: float | None) -> float | None:
        return None if ago is None else max(self.announced, self.ended - ago)
