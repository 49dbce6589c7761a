"""The pipeline as the API sees it: start, submit, cancel, health, close. Routes what the stages say to the requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from triptych.config.schema import DeployConfig, StageKind
from triptych.connectors import segments
from triptych.connectors.wire import (
    Fatal,
    Freed,
    Heartbeat,
    Hello,
    Loaded,
    LoadProgress,
    decode_to_server,
)
from triptych.errors import CapacityError, ConfigError, TriptychError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.pipeline.admission import admit
from triptych.pipeline.health import PipelineHealth, ProcessState
from triptych.pipeline.request import GenerationRequest
from triptych.pipeline.request_table import RequestTable
from triptych.pipeline.routing import Router
from triptych.pipeline.stage_process import StageProcess
from triptych.pipeline.stream import RequestStream
from triptych.pipeline.supervisor import STAGE_COMMAND, Progress, Supervisor
from triptych.pipeline.warm_up import warm_up_request

logger = logging.getLogger(__name__)

LONGEST_IPC_PATH = 100  # a UNIX socket path has room for 103 to 107 bytes
RETRY_AFTER_FAILED_S = 60


class Orchestrator:
    """Admits requests, announces each to the stages it needs, and follows it until all of them let go of it.

    Everything runs in the event loop that `start` was awaited in; no method may be called from another thread.
    """

    def __init__(self, *, supervisor: Supervisor, deploy: DeployConfig, config: OmniConfig, run_dir: Path) -> None:
        self._supervisor = supervisor
        self._deploy = deploy
        self._config = config
        self._run_dir = run_dir
        self._loop = asyncio.get_running_loop()
        self._router = Router({stage.stage: stage.max_num_seqs for stage in deploy.stages})
        self._requests = RequestTable(supervisor, self._router)
        self._warming: asyncio.Task[None] | None = None
        self._warm_up_numbers = itertools.count()
        self._started = False
        self._refuses = self._closed = False
        supervisor.listen(receive=self._receive, on_loaded=self._on_loaded, on_down=self._requests.lose)

    @classmethod
    async def start(
        cls,
        *,
        deploy: DeployConfig,
        model: str,
        config: OmniConfig,
        log_level: str = "info",
        on_progress: Progress | None = None,
        command: Sequence[str] = STAGE_COMMAND,
    ) -> Orchestrator:
        """Start every stage process, wait until all are loaded, and serve one small request through all stages.

        `command` starts a stage process; `--endpoint` and `--process` are appended. Raises CheckpointError,
        ConfigError or StageError with the stage's own message when a stage cannot load; nothing is left behind then.
        """
        segments.sweep_stale()
        run_dir = _make_run_dir()
        supervisor = Supervisor(
            deploy=deploy,
            model=model,
            run_dir=run_dir,
            command=command,
            log_level=log_level,
            on_progress=on_progress or _ignore,
        )
        self = cls(supervisor=supervisor, deploy=deploy, config=config, run_dir=run_dir)
        try:
            await supervisor.start()
            await self._warm_up()
        except BaseException:
            await self.close()
            raise
        self._started = True
        return self

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Admit a request and announce it to its stages. From then on its lease is the orchestrator's.

        Raises ContextLengthError or RequestError when it cannot be served, and CapacityError when it cannot be served
        now: 429 when the queue is full, 503 when no replica of a stage it needs is up.
        """
        admission = admit(request, self._deploy, self._config)
        self.check_room(speak=request.speaks)
        hosts = {kind: self._choose(kind) for kind in admission.stages}
        return self._requests.open(request, admission, hosts, self._deploy.request_timeout_s)

    def check_room(self, *, speak: bool) -> None:
        """Raise the CapacityError that `submit` would raise now, before more work goes into a request."""
        if self._refuses:
            raise CapacityError("the server is shutting down", status=503)
        for stage in self._deploy.stages:
            if speak or stage.stage == "thinker":
                self._check_up(stage.stage)
        held = self._requests.num_running + self._requests.num_freeing
        places = len(self._up("thinker")) * self._max_num_seqs
        if held >= places + self._deploy.max_queued_requests:
            raise CapacityError(
                f"{held} requests are running or waiting (max_num_seqs {places} + max_queued_requests "
                f"{self._deploy.max_queued_requests}); try again later"
            )

    def cancel(self, request_id: str) -> None:
        """End a request now: its stream's next and last event is a Done with finish reason "abort". Idempotent."""
        self._requests.cancel(request_id)

    def health(self) -> PipelineHealth:
        now = self._loop.time()
        processes = self._supervisor.processes
        places = len(self._supervisor.replicas("thinker")) * self._max_num_seqs
        return PipelineHealth(
            ready=not self._refuses and all(self._up(stage.stage) for stage in self._deploy.stages),
            processes={name: process.health(now) for name, process in processes.items()},
            stages={
                process.replica_of(kind): msgspec.structs.replace(stats, replica=process.replica)
                for process in processes.values()
                for kind, stats in process.stats.items()
            },
            running=min(self._requests.num_running, places),
            queued=max(0, self._requests.num_running - places),
            freeing=self._requests.num_freeing,
        )

    def refuse(self) -> None:
        """Take no request any more, and fail what is running. Idempotent."""
        self._refuses = True
        self._requests.fail_all(CapacityError("the server is shutting down", status=503))

    async def close(self) -> None:
        """Fail what is running, stop every process within 5 s, and remove every trace of the run. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.refuse()
        if self._warming is not None:
            self._warming.cancel()
        try:
            await self._supervisor.stop()
        finally:
            self._requests.close()
            segments.sweep(segments.token_of(self._run_dir.name))
            shutil.rmtree(self._run_dir, ignore_errors=True)  # a process may unlink its own socket meanwhile

    @property
    def _max_num_seqs(self) -> int:
        """Of one replica of the Thinker."""
        thinker = self._deploy.stage("thinker")
        return thinker.max_num_seqs if thinker else 0

    # --- requests ---

    def _up(self, kind: StageKind) -> dict[str, StageProcess]:
        """The replicas of a stage that take requests."""
        replicas = self._supervisor.replicas(kind)
        return {name: process for name, process in replicas.items() if process.state is ProcessState.READY}

    def _choose(self, kind: StageKind) -> StageProcess:
        up = self._up(kind)
        return up[self._router.choose(kind, up)]

    def _check_up(self, kind: StageKind) -> None:
        if self._up(kind):
            return
        coming = [
            process for process in self._supervisor.replicas(kind).values() if process.state is not ProcessState.FAILED
        ]
        if not coming:
            raise CapacityError(
                f"stage {kind} died too often and is not started again; see the server's log",
                retry_after=RETRY_AFTER_FAILED_S,
                status=503,
            )
        first = min(coming, key=lambda process: process.load_seconds)
        retry_after = min(RETRY_AFTER_FAILED_S, 1 + round(first.load_seconds))
        raise CapacityError(f"stage {kind} is {first.state}; try again later", retry_after, status=503)

    # --- messages from the stages ---

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_to_server(frames[0])
        except msgspec.DecodeError as error:
            sender = self._supervisor.connected(identity)
            logger.error("a message from %r cannot be decoded: %s", identity, error)
            if sender is not None:
                sender.kill("it sent a malformed message")
            return
        if isinstance(message, Hello):
            self._supervisor.greet(identity, message)
            return
        process = self._supervisor.connected(identity)
        if process is None:
            return  # the last words of a process whose death is already dealt with
        match message:
            case LoadProgress() | Loaded() | Heartbeat() | Fatal():
                self._supervisor.on_message(process, message)
            case Freed(request_id=request_id, stage=stage, times=times):
                self._requests.freed(request_id, process, stage, times=times)
            case _:
                self._requests.advance(message, frames[1] if len(frames) > 1 else b"")

    # --- processes ---

    def _on_loaded(self, process: StageProcess) -> None:
        if self._started and (self._warming is None or self._warming.done()):  # else it comes to this one too
            self._warming = asyncio.create_task(self._warm_up_again(), name=f"warm up {process.name}")

    async def _warm_up(self) -> None:
        """Serve one real request after the other until every replica has had one. Raises what a request raises."""
        while fresh := _not_ready(hosts := self._warm_up_hosts()):
            await self._serve_warm_up(hosts, fresh)

    async def _warm_up_again(self) -> None:
        """After a restart: a process that cannot serve the warm-up is ended and counts as one that died again."""
        while fresh := _not_ready(hosts := self._warm_up_hosts()):
            try:
                await self._serve_warm_up(hosts, fresh)
            except TriptychError as error:
                named = hosts.get(getattr(error, "stage", "thinker"), hosts["thinker"])
                if not named.serving:
                    continue  # it died under the warm-up, which says nothing of the others
                for process in [named] if named in fresh else fresh:
                    if process.pid == fresh[process]:
                        process.kill(f"its warm-up request failed: {error}")

    async def _serve_warm_up(self, hosts: Mapping[StageKind, StageProcess], fresh: Mapping[StageProcess, int]) -> None:
        request_id = f"warm-up-{next(self._warm_up_numbers)}"
        request = warm_up_request(request_id, self._config, speak=len(hosts) > 1)
        admission = admit(request, self._deploy, self._config)
        async with self._requests.open(request, admission, hosts, self._deploy.stage_init_timeout_s) as stream:
            async for event in stream:
                logger.debug("warm-up: %s", type(event).__name__)
        for process, pid in fresh.items():
            if process.serving and process.pid == pid:
                self._supervisor.ready(process)

    def _warm_up_hosts(self) -> dict[StageKind, StageProcess]:
        """A replica of each stage, one that is not ready yet where there is one. Speech stages wait until there is one
        of each, and all wait for the Thinker."""
        hosts: dict[StageKind, StageProcess] = {}
        for stage in self._deploy.stages:
            serving = [process for process in self._supervisor.replicas(stage.stage).values() if process.serving]
            fresh = [process for process in serving if process.state is not ProcessState.READY]
            if serving:
                hosts[stage.stage] = (fresh or serving)[0]
        if len(hosts) == len(self._deploy.stages):
            return hosts
        return {kind: process for kind, process in hosts.items() if kind == "thinker"}


def _not_ready(hosts: Mapping[StageKind, StageProcess]) -> dict[StageProcess, int]:
    """Those processes that have not served a warm-up yet, with their pids."""
    return {
        process: process.pid
        for process in hosts.values()
        if process.state is not ProcessState.READY and process.pid is not None
    }


def _make_run_dir() -> Path:
    """A private folder for the sockets of this run. Its name carries the pid, by which stale ones are told."""
    run_dir = Path(tempfile.mkdtemp(prefix=f"triptych-{os.getpid()}x"))
    if len(f"{run_dir}/control.sock".encode()) > LONGEST_IPC_PATH:
        run_dir.rmdir()
        raise ConfigError(
            f"the temporary folder {run_dir.parent} is too long a path for sockets; set TMPDIR to a short one"
        )
    return run_dir


def _ignore(_: LoadProgress | Loaded) -> None:
    """Nobody asked for progress."""
