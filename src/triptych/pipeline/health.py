"""What the server can say about its pipeline at any moment, for readiness and metrics."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.config.schema import StageKind
from triptych.connectors.wire import StageStats


class ProcessState(enum.StrEnum):
    LOADING = "loading"  # for the first time
    READY = "ready"
    RESTARTING = "restarting"  # died, and is waiting, loading or warming up again
    FAILED = "failed"  # died too often; nobody starts it again


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHealth:
    """`heartbeat_age_s` is None before the first heartbeat; `pid` is None while no process runs."""

    name: str
    stages: tuple[StageKind, ...]
    state: ProcessState
    pid: int | None
    heartbeat_age_s: float | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHealth:
    """`stages` holds the latest statistics of each stage. `running` and `queued` are requests against the Thinker's
    `max_num_seqs`; `freeing` are aborted ones that some stage still holds."""

    ready: bool
    processes: Mapping[str, ProcessHealth]
    stages: Mapping[StageKind, StageStats]
    running: int
    queued: int
    freeing: int

    @property
    def restarts(self) -> int:
        return sum(process.restarts for process in self.processes.values())
