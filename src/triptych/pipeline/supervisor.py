"""Starts the stage processes, watches them, and starts again what dies. Knows no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from triptych.config.schema import DeployConfig, StageKind
from triptych.connectors import segments
from triptych.connectors.wire import (
    Configure,
    Fatal,
    Heartbeat,
    Hello,
    Loaded,
    LoadProgress,
    PeerRestarted,
    Shutdown,
    ToStage,
)
from triptych.errors import ConnectorClosed, StageError, TriptychError
from triptych.pipeline.control import ControlSocket, Receive
from triptych.pipeline.health import ProcessState
from triptych.pipeline.stage_process import StageProcess, stage_processes

logger = logging.getLogger(__name__)

STAGE_COMMAND = (sys.executable, "-m", "triptych.stages")
STOP_S = 4.0  # for a process to leave after `Shutdown`
KILL_S = 5.0  # for a killed process to be reaped: on a busy machine it takes its time
FATAL_S = 0.5  # for the last message of a process that has exited by itself
LATE_S = 1.0  # at least, for a heartbeat that is overdue

Progress = Callable[[LoadProgress | Loaded], None]


class Supervisor:
    """One task for each process: spawn, wait for its end, report it, wait out the backoff, spawn again."""

    def __init__(
        self,
        *,
        deploy: DeployConfig,
        model: str,
        run_dir: Path,
        command: Sequence[str],
        log_level: str,
        on_progress: Progress,
    ) -> None:
        self._deploy = deploy
        self._model = model
        self._run_dir = run_dir
        self._token = run_dir.name.removeprefix("triptych-")
        self._command = tuple(command)
        self._log_level = log_level
        self._endpoint = f"ipc://{run_dir}/control.sock"
        self._on_progress = on_progress
        self._receive: Receive
        self._on_loaded: Callable[[StageProcess], None]
        self._on_down: Callable[[StageProcess, str], None]
        self._control = ControlSocket(lambda identity, frames: self._receive(identity, frames))
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()  # every process has loaded for the first time, or one never will
        self._start_error: TriptychError | None = None
        self._peers = {name: f"ipc://{run_dir}/{index}.sock" for index, name in enumerate(deploy.processes)}
        self.processes: Mapping[str, StageProcess] = stage_processes(deploy)

    def listen(
        self,
        *,
        receive: Receive,
        on_loaded: Callable[[StageProcess], None],
        on_down: Callable[[StageProcess, str], None],
    ) -> None:
        """Whom to tell, before `start`: of every message; whenever a process has loaded; and whenever one is gone,
        with the cause, before it is started again."""
        self._receive, self._on_loaded, self._on_down = receive, on_loaded, on_down

    async def start(self) -> None:
        """Start every process at the same time and wait until all have loaded.

        Raises CheckpointError, ConfigError or StageError with the stage's own message when one does not.
        """
        self._control.bind(self._endpoint)
        self._tasks = [
            asyncio.create_task(self._keep_alive(process), name=f"process {name}")
            for name, process in self.processes.items()
        ]
        for task in self._tasks:
            task.add_done_callback(self._check_task)
        await self._settled.wait()
        if self._start_error is not None:
            raise self._start_error

    async def stop(self) -> None:
        """Ask every process to leave, then end those that do not, within STOP_S + KILL_S."""
        self._stopping.set()
        for process in self.processes.values():
            if not (process.loaded and self.send(process, Shutdown())):
                process.kill("the server is stopping")
        for grace in (STOP_S, KILL_S):
            if self._tasks:
                _, running = await asyncio.wait(self._tasks, timeout=grace)
                for process in self.processes.values() if running else ():
                    process.kill("it did not stop when told to")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.processes.values():
            process.abandon()
        self._control.close()

    def replicas(self, kind: StageKind) -> dict[str, StageProcess]:
        """The process of each replica of a stage, by the replica's name and in order."""
        return {
            name: process
            for process in self.processes.values()
            for name, held in process.stages.items()
            if held == kind
        }

    def connected(self, identity: bytes) -> StageProcess | None:
        """The process behind a message; None for one that is gone, whose last messages count no more."""
        return next((process for process in self.processes.values() if process.identity == identity), None)

    def send(self, process: StageProcess, message: ToStage) -> bool:
        """False when there is nobody to send to. A process that has stopped reading is killed."""
        if process.identity is None:
            return False
        try:
            sent = self._control.send(process.identity, message)
        except ConnectorClosed:
            logger.debug("process %s is gone; its exit status is still to come", process.name)
            return False
        if not sent:
            process.kill("it takes no messages")
        return sent

    def ready(self, process: StageProcess) -> None:
        """The process has served its warm-up request."""
        process.state = ProcessState.READY
        logger.info("process %s is ready (%s)", process.name, ", ".join(process.stages))

    # --- messages ---

    def greet(self, identity: bytes, message: Hello) -> None:
        process = self.processes.get(message.process)
        if process is None:
            logger.error("there is no process %r in this deployment (pid %d)", message.process, message.pid)
            return
        process.greeting = (identity, message.pid)
        if process.child is not None:
            self._configure(process)

    def _configure(self, process: StageProcess) -> None:
        """Answer a process that has connected, if it is the one that was spawned."""
        if process.greeting is None:
            return
        identity, pid = process.greeting
        if pid != process.pid:
            logger.error("process %r with pid %d is not the one that was started (%s)", process.name, pid, process.pid)
            return
        process.identity = identity
        self.send(
            process,
            Configure(
                deploy=self._deploy,
                model=self._model,
                process=process.name,
                run_dir=str(self._run_dir),
                peers=self._peers,
                log_level=self._log_level,
            ),
        )

    def on_message(self, process: StageProcess, message: LoadProgress | Loaded | Heartbeat | Fatal) -> None:
        match message:
            case LoadProgress():
                self._on_progress(message)
            case Loaded():
                self._loaded(process, message)
            case Heartbeat():
                process.last_heartbeat = self._loop.time()
                process.totals.heard(message.stages)
            case Fatal():
                self._dying(process, message)

    def _dying(self, process: StageProcess, message: Fatal) -> None:
        """Tell it before the process is gone: what its neighbours then say about lost handoffs only follows from it."""
        if process.fatal is not None and not process.fatal.done():
            process.fatal.set_result(message)
        process.retire()
        self._on_down(process, str(process.ending(1, message)))
        self.send(process, Shutdown())

    def _loaded(self, process: StageProcess, message: Loaded) -> None:
        process.loaded = True
        process.load_seconds = message.seconds
        process.last_heartbeat = self._loop.time()
        self._set_timer(process, self._deploy.heartbeat_timeout_s, self._check_heartbeat)
        logger.info("process %s loaded in %.1f s: %s", process.name, message.seconds, "; ".join(message.summary))
        self._on_progress(message)
        if all(other.loaded for other in self.processes.values()):
            self._settled.set()
        self._on_loaded(process)

    # --- the life of a process ---

    async def _keep_alive(self, process: StageProcess) -> None:
        while True:
            cause = await self._run_once(process)
            was_loaded = process.loaded
            process.reset()
            if self._stopping.is_set():
                return
            logger.error("process %s (%s) is down: %s", process.name, ", ".join(process.stages), cause)
            delay = self._next_delay(process)
            if delay is None:
                process.state = ProcessState.FAILED
                logger.error("process %s is not started again", process.name)
                self._give_up_start(process, cause, was_loaded)
            else:
                process.state = ProcessState.RESTARTING
            self._announce_death(process, cause)
            segments.sweep(self._token, process.name)
            if delay is None:
                return
            process.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A fault of the supervisor itself must not leave `start` waiting, nor a process unwatched in silence."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("%s is not watched any more", task.get_name(), exc_info=error)
            if not self._settled.is_set():
                self._start_error = StageError(f"{task.get_name()} cannot be watched: {error!r}", "server")
                self._settled.set()

    def _next_delay(self, process: StageProcess) -> float | None:
        """None for a process that never was ready: what keeps it from that is for the user to see, not to retry."""
        return None if process.state is ProcessState.LOADING else process.budget.next_delay(self._loop.time())

    def _give_up_start(self, process: StageProcess, cause: TriptychError, was_loaded: bool) -> None:
        if self._start_error is None and not self._settled.is_set():
            self._start_error = cause
            if isinstance(cause, StageError):
                when = "after it had loaded" if was_loaded else "while loading"
                message = f"stage {cause.stage} (process {process.name!r}) failed {when}: {cause}"
                self._start_error = StageError(message, cause.stage, status=503)
            self._settled.set()

    def _announce_death(self, process: StageProcess, cause: TriptychError) -> None:
        self._on_down(process, str(cause))
        for other in self.processes.values():
            if other is not process:
                self.send(other, PeerRestarted(process=process.name))

    async def _run_once(self, process: StageProcess) -> TriptychError:
        """Spawn the process and wait for its end. Returns why it ended."""
        process.fatal = self._loop.create_future()
        try:
            child = await process.spawn((*self._command, "--endpoint", self._endpoint, "--process", process.name))
        except OSError as error:
            return StageError(f"it cannot be started: {error}", next(iter(process.stages.values())), status=503)
        self._configure(process)  # on a busy machine it may have connected before the spawn returned
        self._set_timer(process, self._deploy.stage_init_timeout_s, self._check_load)
        if self._stopping.is_set():
            child.kill()
        code = await child.wait()
        process.kill_descendants()
        return process.ending(code, await self._last_words(process, code))

    async def _last_words(self, process: StageProcess, code: int) -> Fatal | None:
        """What a process that exited by itself has said before; it may still be on its way."""
        if process.fatal is None or code != 1:
            return None
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(process.fatal, FATAL_S)
        return None

    # --- deadlines ---

    def _set_timer(self, process: StageProcess, seconds: float, check: Callable[[StageProcess], None]) -> None:
        if process.timer is not None:
            process.timer.cancel()
        process.timer = self._loop.call_later(seconds, check, process)

    def _check_load(self, process: StageProcess) -> None:
        process.kill(f"it did not load within stage_init_timeout_s = {self._deploy.stage_init_timeout_s:g}")

    def _check_heartbeat(self, process: StageProcess, *, again: bool = False) -> None:
        while self._control.drain():
            continue  # a server that was suspended itself has heartbeats to read first
        if process.last_heartbeat is None:
            return
        limit = self._deploy.heartbeat_timeout_s
        age = self._loop.time() - process.last_heartbeat
        if age < limit:
            self._set_timer(process, limit - age, self._check_heartbeat)
        elif not again:  # a machine that stood still has stopped the heartbeats and this clock alike
            self._set_timer(process, max(LATE_S, limit / 10), partial(self._check_heartbeat, again=True))
        else:
            process.kill(f"it sent no heartbeat for {age:.1f} s (heartbeat_timeout_s = {limit:g})")
