"""What the scheduler hands to the runner for one step: plain integers only."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.engine.request import EngineRequest


@dataclass(slots=True, frozen=True)
class ScheduledRow:
    """Rows [start, start + num_tokens) of one request. `samples` when they reach the end of what is known and the
    row's output is a new token."""

    request: EngineRequest
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True, frozen=True)
class ScheduledBatch:
    """One step. `rows` holds decode rows (one token) first, then prefill pieces; `preempted` lost their blocks, and for
    `admitted` it is the first step."""

    rows: tuple[ScheduledRow, ...]
    preempted: tuple[EngineRequest, ...] = ()
    admitted: tuple[EngineRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_decode_only(self) -> bool:
        return all(row.num_tokens == 1 for row in self.rows)
