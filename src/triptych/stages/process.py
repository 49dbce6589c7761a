"""A stage process: configure, load, then one loop that takes turns between control, connectors and stages."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import zmq

from triptych import log
from triptych.config.schema import StageKind
from triptych.connectors import segments
from triptych.connectors.endpoint import Endpoint
from triptych.connectors.wire import (
    Abort,
    Configure,
    Fatal,
    Freed,
    Grant,
    Heartbeat,
    Hello,
    Loaded,
    PeerRestarted,
    Shutdown,
    SubmitCodec,
    SubmitSpeech,
    SubmitText,
    ToStage,
    decode_to_stage,
)
from triptych.errors import StageError, TriptychError
from triptych.stages.build import Load, StageLoader
from triptych.stages.contract import Stage, Submit
from triptych.stages.lifeline import Lifeline
from triptych.stages.outbox import SEND_HIGH_WATER_MARK, Outbox

if TYPE_CHECKING:
    from triptych.stages.profiler import StepProfiler

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# A listener waits for Code2Wav, and all streams that started together need their next chunk at the same time.
STEPS_PER_TURN: dict[StageKind, int] = {"thinker": 1, "talker": 1, "code2wav": 8}
CONFIGURE_TIMEOUT_S = 30.0
DISMISSAL_S = 1.0  # for the server to take note of a fatal error
ORPHAN_GRACE_S = 2.0  # how long an orphaned process may take to leave by itself
RECEIVE_HIGH_WATER_MARK = 4096  # a few messages a request; a server that exceeds it takes the process for stuck
LINGER_MS = 1000  # how long the last messages may take to reach the server

_TARGET: dict[type[Submit], StageKind] = {SubmitText: "thinker", SubmitSpeech: "talker", SubmitCodec: "code2wav"}


class Connections(Protocol):
    """What the loop needs of the connectors' `Endpoint`."""

    @property
    def socket(self) -> zmq.Socket[bytes]: ...

    def pump(self) -> bool: ...

    def reset_peer(self, process: str) -> None: ...


class ProcessLoop:
    """Steps the stages of one process in turn, in one thread, and sleeps in `poll` when none has work.

    Everything that can wake it is in that poll: the control socket, the connectors' socket and the lifeline; its
    timeout is the next heartbeat. A step that raises ends the loop: `stage` names it.
    """

    def __init__(
        self,
        *,
        process: str,
        control: zmq.Socket[bytes],
        outbox: Outbox,
        endpoint: Connections,
        stages: Sequence[Stage],
        lifeline: Lifeline,
        profiler: StepProfiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._control = control
        self._outbox = outbox
        self._endpoint = endpoint
        self._stages = tuple(stages)
        self._by_kind = {stage.kind: stage for stage in stages}
        self._lifeline = lifeline
        self._profiler = profiler
        self._clock = clock
        self._next_heartbeat = clock()
        self._stopped = False
        self._poller = zmq.Poller()
        self._poller.register(endpoint.socket, zmq.POLLIN)
        self._poller.register(lifeline.fd, zmq.POLLIN)
        self.stage: StageKind | None = None

    def run(self) -> None:
        """Return on `Shutdown` or when the server is gone; raise what a stage raised."""
        while True:
            self._take_control()
            if self._stopped or self._lifeline.cut:
                return
            self._take_inputs()
            self._beat()
            if not self._outbox.flush():
                self._wait(zmq.POLLIN | zmq.POLLOUT)
            elif not self._step():
                self._wait(zmq.POLLIN)

    def _take_control(self) -> None:
        while not self._stopped:
            try:
                frame = self._control.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(decode_to_stage(frame))

    def _dispatch(self, message: ToStage) -> None:
        match message:
            case SubmitText() | SubmitSpeech() | SubmitCodec():
                kind = _TARGET[type(message)]
                if kind not in self._by_kind:
                    raise StageError(f"process {self._process!r} has no {kind}", kind, message.request_id)
                self._by_kind[kind].submit(message)
            case Grant():
                for stage in self._stages:
                    stage.grant(message)
            case Abort(request_id=request_id):
                for stage in self._stages:
                    times = stage.abort(request_id)
                    self._outbox.send(Freed(request_id=request_id, stage=stage.kind, times=times))
            case PeerRestarted(process=process):
                self._endpoint.reset_peer(process)
            case Shutdown():
                self._stopped = True
            case Configure():
                raise StageError(f"process {self._process!r} was configured twice", self._stages[0].kind)

    def _take_inputs(self) -> None:
        self._endpoint.pump()
        # Credit flows backwards: what a later stage releases is what an earlier one of this process may be parked on.
        # What that hands on as it takes its inputs flows forwards: no socket says so, and the loop may sleep next.
        for stage in (*reversed(self._stages), *self._stages[1:]):
            self.stage = stage.kind
            stage.poll_inputs()
        self.stage = None

    def _step(self) -> bool:
        stepped = False
        # Who is nearest to the listener is first: a chunk that could be sound does not wait for a step of the Thinker.
        for stage in reversed(self._stages):
            self.stage = stage.kind
            if stepped:
                stage.poll_inputs()  # what the stage behind it has just released
            for _ in range(STEPS_PER_TURN[stage.kind]):
                if not stage.has_work():
                    break
                if self._profiler is None:
                    stage.step()
                else:
                    self._profiler.step(stage)
                stepped = True
        self.stage = None
        return stepped

    def _beat(self) -> None:
        now = self._clock()
        if now >= self._next_heartbeat and self._outbox.flush():
            self._outbox.send(Heartbeat(process=self._process, stages=tuple(stage.stats() for stage in self._stages)))
            self._next_heartbeat = now + HEARTBEAT_S

    def _wait(self, control_events: int) -> None:
        self._poller.register(self._control, control_events)
        seconds = self._next_heartbeat - self._clock()
        # A heartbeat that cannot be sent must not turn the wait into a spin: POLLOUT wakes it when it can be.
        if control_events & zmq.POLLOUT:
            seconds = HEARTBEAT_S
        self._poller.poll(max(0, int(seconds * 1000) + 1))


def run_process(*, endpoint: str, process: str, load: Load, lifeline_fd: int = 0) -> int:
    """Live as the process `process` of the server at `endpoint`, until told to stop. Returns the exit status.

    An error ends the process with status 1, after a `Fatal` that carries its message and a traceback in the log.
    """
    run_dir = Path(endpoint.removeprefix("ipc://")).parent
    lifeline = Lifeline(lifeline_fd, grace_s=ORPHAN_GRACE_S, last_resort=lambda: _sweep(run_dir))
    context = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.setsockopt(zmq.IDENTITY, f"{process}:{os.getpid()}".encode())
    control.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    control.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
    control.connect(endpoint)
    outbox = Outbox(control)
    outbox.send(Hello(process=process, pid=os.getpid()))
    try:
        configure = _await_configure(control, process)
        return 1 if configure is None else _serve(configure, control, outbox, load, lifeline)
    finally:
        if lifeline.cut:
            _sweep(run_dir)
        lifeline.release()
        control.close(linger=0 if lifeline.cut else LINGER_MS)
        context.term()


def _await_configure(control: zmq.Socket[bytes], process: str) -> Configure | None:
    if not control.poll(int(CONFIGURE_TIMEOUT_S * 1000)):
        logger.error("process %s got no configuration within %.0f s", process, CONFIGURE_TIMEOUT_S)
        return None
    message = decode_to_stage(control.recv())
    return message if isinstance(message, Configure) else None


def _serve(configure: Configure, control: zmq.Socket[bytes], outbox: Outbox, load: Load, lifeline: Lifeline) -> int:
    """Load the stages and run the loop. Returns the exit status."""
    process = configure.process
    log.configure(configure.log_level, process)
    doing: StageLoader | ProcessLoop | None = None
    endpoint: Endpoint | None = None
    stages: list[Stage] = []
    profiler: StepProfiler | None = None
    try:
        started = time.monotonic()
        endpoint = Endpoint(process=process, run_dir=configure.run_dir, peers=configure.peers)
        doing = loader = StageLoader(
            deploy=configure.deploy, model=configure.model, process=process, outbox=outbox, endpoint=endpoint
        )
        stages = loader.load(load)
        if configure.deploy.profile.dir:
            from triptych.stages.profiler import StepProfiler

            profiler = StepProfiler.of(configure.deploy, process)
        # What importing and loading made is here to stay; looking through all of it would stop every stream for 0.1 s.
        gc.freeze()
        outbox.send(Loaded(process=process, seconds=time.monotonic() - started, summary=tuple(map(_summary, stages))))
        doing = loop = ProcessLoop(
            process=process,
            control=control,
            outbox=outbox,
            endpoint=endpoint,
            stages=stages,
            lifeline=lifeline,
            profiler=profiler,
        )
        loop.run()
    except Exception as error:
        stage = doing.stage if doing else None
        if isinstance(error, TriptychError):
            logger.error("%s", error)
        else:
            logger.exception("process %s failed in %s", process, stage or "its loop")
        message = str(error) or repr(error)
        outbox.send(Fatal(process=process, message=message, error=type(error).__name__, stage=stage))
        _await_dismissal(control)
        return 1
    finally:
        if profiler is not None:
            profiler.close()
        for stage_to_close in reversed(stages):
            stage_to_close.close()
        if endpoint is not None:
            endpoint.close()
    return 0


def _await_dismissal(control: zmq.Socket[bytes]) -> None:
    """Let the server fail the requests of this process before closing breaks what its neighbours are reading."""
    deadline = time.monotonic() + DISMISSAL_S
    while control.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        if isinstance(decode_to_stage(control.recv()), Shutdown):
            return


def _summary(stage: Stage) -> str:
    blocks = stage.stats().kv_blocks_total
    return f"{stage.kind} is loaded" + (f", {blocks} KV blocks" if blocks else "")


def _sweep(run_dir: Path) -> None:
    """The server is gone and cannot tidy up: remove the shared memory and the folder of its run."""
    segments.sweep_server(segments.token_of(run_dir.name))
    shutil.rmtree(run_dir, ignore_errors=True)  # the other processes of this run do the same
