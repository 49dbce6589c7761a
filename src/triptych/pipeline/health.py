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
    """`stages` are the replicas of stages that the process holds, by name; all have the number `replica`.

    `heartbeat_age_s` is None before the first heartbeat; `pid` is None while no process runs.
    """

    name: str
    stages: Mapping[str, StageKind]
    replica: int = 0
    state: ProcessState
    pid: int | None
    heartbeat_age_s: float | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHealth:
    """`ready` is whether every stage has a replica that takes requests. `stages` holds the latest statistics of each
    replica, by its name. `running` and `queued` are requests against the Thinker's `max_num_seqs`, of all its replicas
    together; `freeing` are aborted ones that some stage still holds."""

    ready: bool
    processes: Mapping[str, ProcessHealth]
    stages: Mapping[str, StageStats]
    running: int
    queued: int
    freeing: int

    @property
    def restarts(self) -> int:
        return sum(process.restarts for process in self.processes.values())
