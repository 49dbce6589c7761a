"""One stage process as the server knows it: what it holds, how it is, and how to reach it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import PIPE

from triptych.config.schema import DeployConfig, StageKind
from triptych.connectors.wire import Fatal, StageStats
from triptych.errors import CheckpointError, ConfigError, StageError, TriptychError
from triptych.pipeline.health import ProcessHealth, ProcessState
from triptych.pipeline.restarts import RestartBudget
from triptych.pipeline.stage_totals import StageTotals


@dataclass(slots=True, kw_only=True, eq=False)
class StageProcess:
    """Outlives the OS processes that play it one after the other; `identity` names the one that is connected now.

    `stages` are the replicas of stages that it holds, by name; all have the number `replica`.
    """

    name: str
    stages: Mapping[str, StageKind]
    replica: int = 0
    budget: RestartBudget
    state: ProcessState = ProcessState.LOADING
    child: asyncio.subprocess.Process | None = None
    greeting: tuple[bytes, int] | None = None  # identity and pid of who has connected
    identity: bytes | None = None
    loaded: bool = False
    load_seconds: float = 1.0
    last_heartbeat: float | None = None
    totals: StageTotals = field(default_factory=StageTotals)
    restarts: int = 0
    fatal: asyncio.Future[Fatal] | None = None
    killed_because: str | None = None
    timer: asyncio.TimerHandle | None = None  # the load deadline, then the heartbeat deadline

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None else None

    def replica_of(self, kind: StageKind) -> str:
        """The name of its replica of that stage, which it must hold."""
        return next(name for name, held in self.stages.items() if held == kind)

    @property
    def serving(self) -> bool:
        """Whether it has loaded and is not known to be going down."""
        dying = self.killed_because is not None or (self.fatal is not None and self.fatal.done())
        return self.loaded and not dying

    @property
    def stats(self) -> dict[StageKind, StageStats]:
        """How its stages are, with the counts of all that played it."""
        return self.totals.stats()

    async def spawn(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        """Start the OS process. Raises OSError."""
        self.child = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,  # the lifeline: it ends when this server does
            process_group=0,  # Ctrl-C in a terminal is for the server alone
        )
        return self.child

    def kill(self, because: str) -> None:
        """End the OS process now; what follows is what follows any other death."""
        if self.child is not None and self.child.returncode is None:
            self.killed_because = self.killed_because or because
            self.child.kill()
            self.retire()

    def retire(self) -> None:
        """It is going down: nothing new is for it until it is back."""
        if self.state is ProcessState.READY:
            self.state = ProcessState.RESTARTING

    def kill_descendants(self) -> None:
        """What a process that is gone had started itself goes with it."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Close the lifeline to an OS process that was not reaped in time: no pipe may outlive the event loop."""
        if self.child is not None and self.child.stdin is not None:
            self.child.stdin.close()

    def reset(self) -> None:
        """Forget the OS process that is gone."""
        if self.timer is not None:
            self.timer.cancel()
        self.child = self.greeting = self.identity = self.last_heartbeat = None
        self.killed_because = self.timer = self.fatal = None
        self.loaded = False
        self.totals.ended()

    def ending(self, code: int, last_words: Fatal | None) -> TriptychError:
        """Why the OS process ended: killed by the server, by a signal, or by itself with an error."""
        stage = next(iter(self.stages.values()))
        if self.killed_because is not None:
            return StageError(self.killed_because, stage, status=503)
        if code < 0:
            return StageError(f"it was ended by {signal.Signals(-code).name}", stage, status=503)
        if last_words is None:
            return StageError(f"it exited with status {code}", stage, status=503)
        if last_words.error == CheckpointError.__name__:
            return CheckpointError(last_words.message)
        if last_words.error == ConfigError.__name__:
            return ConfigError(last_words.message)
        return StageError(f"{last_words.error}: {last_words.message}", last_words.stage or stage, status=503)

    def health(self, now: float) -> ProcessHealth:
        return ProcessHealth(
            name=self.name,
            stages=self.stages,
            replica=self.replica,
            state=self.state,
            pid=self.pid,
            heartbeat_age_s=None if self.last_heartbeat is None else now - self.last_heartbeat,
            restarts=self.restarts,
        )


def stage_processes(deploy: DeployConfig) -> dict[str, StageProcess]:
    """Every process of a deployment by name, with the replicas of stages that it holds."""
    held: dict[str, dict[str, StageKind]] = {name: {} for name in deploy.processes}
    numbers: dict[str, int] = {}
    for stage in deploy.stages:
        for number, (name, replica) in enumerate(deploy.replicas(stage.stage).items()):
            held[replica.process][name] = stage.stage
            numbers[replica.process] = number
    return {
        name: StageProcess(
            name=name, stages=stages, replica=numbers[name], budget=RestartBudget(deploy.max_stage_restarts)
        )
        for name, stages in held.items()
    }
