"""Every request that some stage still holds: those that run, and those that are being freed after an abort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from triptych.config.schema import StageKind
from triptych.connectors.wire import Abort, AudioOutput, Failed, Grant, Route, SpeechOutput, TextOutput
from triptych.errors import DeadlineError, RequestError, StageError, TriptychError
from triptych.pipeline.admission import AUDIO_CREDIT, Admission
from triptych.pipeline.request import GenerationRequest
from triptych.pipeline.request_state import RequestState
from triptych.pipeline.routing import Router
from triptych.pipeline.stage_process import StageProcess
from triptych.pipeline.stage_report import Outcome, StageReport
from triptych.pipeline.stream import RequestStream
from triptych.pipeline.supervisor import Supervisor
from triptych.telemetry.stage_times import StageTimes

logger = logging.getLogger(__name__)

FREE_S = 10.0  # for every stage to answer `Abort`; a stage that is stuck longer misses its heartbeats too


@dataclass(slots=True)
class _Running:
    state: RequestState
    hosts: Mapping[StageKind, StageProcess]  # of the stages that it needs
    stream: RequestStream
    deadline: asyncio.TimerHandle
    announced: float
    reported: set[StageKind] = field(default_factory=set)  # whose end `on_stage` has heard of

    def report(
        self,
        kind: StageKind,
        outcome: Outcome,
        now: float,
        times: StageTimes | None = None,
        finish_reason: str | None = None,
    ) -> None:
        """Tell of the end of a stage; only the first time counts."""
        on_stage = self.state.request.on_stage
        if on_stage is None or kind in self.reported:
            return
        self.reported.add(kind)
        on_stage(
            StageReport(
                stage=kind,
                replica=self.hosts[kind].replica,
                outcome=outcome,
                announced=self.announced,
                ended=now,
                times=times or StageTimes(),
                num_tokens=self.state.num_tokens(kind),
                finish_reason=finish_reason,
            )
        )

    def close_lease(self) -> None:
        if self.state.request.lease is not None:
            self.state.request.lease.close()


@dataclass(slots=True)
class _Freeing:
    request: _Running
    holders: set[tuple[StageProcess, StageKind]]  # that have not answered yet
    deadline: asyncio.TimerHandle


class RequestTable:
    """Announces requests to their stages, turns what the stages say into events, and ends each request exactly once:
    done, failed, cancelled or left by its consumer. All but the first abort it in every stage.

    Whatever is said of a request is said between the server and the replicas that it was opened with.

    From `open` on the table owns the request's lease. It is closed when no stage can want its media any more: when the
    request is done, or when every stage that was told to free it has.
    """

    def __init__(self, supervisor: Supervisor, router: Router) -> None:
        self._supervisor = supervisor
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._freeing: dict[str, _Freeing] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_freeing(self) -> int:
        return len(self._freeing)

    def open(
        self,
        request: GenerationRequest,
        admission: Admission,
        hosts: Mapping[StageKind, StageProcess],
        timeout_s: float,
    ) -> RequestStream:
        """Announce a request to each stage that it needs, in the process that holds the replica chosen for it.

        `timeout_s` counts from the request's arrival. Raises RequestError when the id is in use: one id names one
        request, in all stages.
        """
        request_id = request.request_id
        if request_id in self._running or request_id in self._freeing:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        running = _Running(
            state=RequestState(request=request, stages=admission.stages, credit=AUDIO_CREDIT),
            hosts={kind: hosts[kind] for kind in admission.stages},
            stream=RequestStream(
                request_id,
                on_taken=lambda: self._grant(request_id),
                on_left=lambda: self._leave(request_id),
            ),
            deadline=self._loop.call_at(
                (self._loop.time() if request.arrival is None else request.arrival) + timeout_s,
                self._expire,
                request_id,
                timeout_s,
            ),
            announced=self._loop.time(),
        )
        self._running[request_id] = running
        route = {kind: host.replica_of(kind) for kind, host in running.hosts.items()}
        for kind, message in admission.messages:
            self._router.submitted(request_id, kind, route[kind], admission.work[kind])
            self._supervisor.send(running.hosts[kind], msgspec.structs.replace(message, route=Route(**route)))
        return running.stream

    def advance(self, message: TextOutput | SpeechOutput | AudioOutput | Failed, samples: bytes) -> None:
        """Take one output of a stage. What a stage sent before our abort reached it is dropped."""
        running = self._running.get(message.request_id)
        if running is None:
            return
        state, stream = running.state, running.stream
        try:
            match message:
                case TextOutput(finish_reason=reason):
                    stream.push(state.on_text(message))
                    if reason is not None:
                        self._stage_finished(running, "thinker", message.times, reason)
                case AudioOutput(final=final):
                    stream.push(state.on_audio(message, samples))
                    if final:
                        self._stage_finished(running, "code2wav", message.times)
                case SpeechOutput(finish_reason=reason):
                    state.on_speech(message)
                    self._stage_finished(running, "talker", message.times, reason)
                case Failed(stage=stage, message=cause):
                    running.report(stage, "failed", self._loop.time(), message.times)
                    raise StageError(f"stage {stage} failed: {cause}", stage, state.request_id)
        except StageError as error:
            logger.error("request %s: %s", state.request_id, error)
            self._fail(running, error)
            return
        done = state.done()
        if done is not None:
            running.deadline.cancel()
            del self._running[state.request_id]
            running.close_lease()
            stream.push(done)

    def cancel(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._abort(running)
            running.stream.cut(running.state.terminal("abort"))

    def lose(self, process: StageProcess, cause: str) -> None:
        """A process has died: fail the requests that still need it, and expect no more answers from it."""
        for running in list(self._running.values()):
            held = (kind for kind in process.stages.values() if running.hosts.get(kind) is process)
            needed = [kind for kind in held if running.state.needs(kind)]
            for kind in needed:
                running.report(kind, "failed", self._loop.time())
            if needed:
                lost = needed[0]
                message = f"stage {lost} (process {process.name!r}) went down: {cause}"
                self._fail(running, StageError(message, lost, running.state.request_id, status=503))
        for request_id in list(self._freeing):
            self.freed(request_id, process, *process.stages.values())

    def freed(
        self, request_id: str, process: StageProcess, *stages: StageKind, times: StageTimes | None = None
    ) -> None:
        """These stages of a process hold nothing of an aborted request any more; `times` are those of the one stage
        that says so itself."""
        freeing = self._freeing.get(request_id)
        if freeing is not None:
            for stage in stages:
                if (process, stage) in freeing.holders:
                    freeing.holders.remove((process, stage))
                    freeing.request.report(stage, "aborted", self._loop.time(), times)
            if not freeing.holders:
                freeing.deadline.cancel()
                del self._freeing[request_id]
                freeing.request.close_lease()

    def fail_all(self, error: TriptychError) -> None:
        for running in list(self._running.values()):
            self._fail(running, error)

    def close(self) -> None:
        """Nobody answers any more."""
        for freeing in self._freeing.values():
            freeing.deadline.cancel()
            self._unanswered(freeing)
        self._freeing.clear()

    def _stage_finished(
        self, running: _Running, kind: StageKind, times: StageTimes | None, finish_reason: str | None = None
    ) -> None:
        self._router.finished(running.state.request_id, kind)
        running.report(kind, "finished", self._loop.time(), times, finish_reason)

    def _grant(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None and not running.state.audio_final:
            running.state.credit += 1
            self._supervisor.send(running.hosts["code2wav"], Grant(request_id=request_id, count=1))

    def _leave(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._abort(running)

    def _expire(self, request_id: str, timeout_s: float) -> None:
        running = self._running[request_id]
        stage = running.state.waits_for() or "thinker"
        message = f"the request took longer than {timeout_s:g} s; it waited for stage {stage} after "
        self._fail(running, DeadlineError(message + running.state.progress(), stage))

    def _fail(self, running: _Running, error: TriptychError) -> None:
        self._abort(running)
        running.stream.fail(error)

    def _abort(self, running: _Running) -> None:
        """Forget the request, and have every stage that may hold it free it."""
        running.deadline.cancel()
        request_id = running.state.request_id
        del self._running[request_id]
        self._router.finished(request_id, *running.hosts)
        hosts = set(running.hosts.values())
        told = {host for host in hosts if host.loaded and self._supervisor.send(host, Abort(request_id=request_id))}
        holders = {(host, kind) for kind, host in running.hosts.items() if host in told}
        for kind, host in running.hosts.items():
            if host not in told:
                running.report(kind, "aborted", self._loop.time())
        if holders:
            deadline = self._loop.call_later(FREE_S, self._give_up, request_id)
            self._freeing[request_id] = _Freeing(running, holders, deadline)
        else:
            running.close_lease()

    def _give_up(self, request_id: str) -> None:
        freeing = self._freeing.pop(request_id)
        self._unanswered(freeing)
        silent = ", ".join(sorted(f"{kind} (process {process.name})" for process, kind in freeing.holders))
        logger.warning("request %s: no answer to its abort from %s", request_id, silent)

    def _unanswered(self, freeing: _Freeing) -> None:
        """Let go of a request that some stages have not freed."""
        freeing.request.close_lease()
        for _, kind in freeing.holders:
            freeing.request.report(kind, "aborted", self._loop.time())
