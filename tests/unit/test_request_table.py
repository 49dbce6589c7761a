"""A request's media is held until no stage can want it any more, and let go of once, however the request ends; and the
end of each of its stages is told once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from typing import Any, cast

import pytest

from tests.fake_pipeline import FakeLease
from tests.fake_stages import CONFIG, deploy_config, generation_request
from triptych.config.schema import StageKind
from triptych.connectors.wire import Abort, AudioOutput, Failed, Route, SpeechOutput, TextOutput
from triptych.errors import DeadlineError, RequestError, StageError, TriptychError
from triptych.pipeline import request_table
from triptych.pipeline.admission import admit
from triptych.pipeline.request_table import RequestTable
from triptych.pipeline.restarts import RestartBudget
from triptych.pipeline.routing import Router
from triptych.pipeline.stage_process import StageProcess
from triptych.pipeline.stage_report import StageReport
from triptych.pipeline.stream import RequestStream
from triptych.pipeline.supervisor import Supervisor
from triptych.telemetry.stage_times import StageTimes

DEPLOY = deploy_config()


def process(name: str, *stages: StageKind, replica: int = 0) -> StageProcess:
    held = {stage if replica == 0 else f"{stage}:{replica}": stage for stage in stages}
    return StageProcess(name=name, stages=held, replica=replica, budget=RestartBudget(0), loaded=True)


class Stages:
    """Takes what the table sends, in the place of a Supervisor."""

    def __init__(self) -> None:
        self.text, self.speech = process("text", "thinker"), process("speech", "talker", "code2wav")
        self.processes = [self.text, self.speech]
        self.sent: dict[StageProcess, list[Any]] = defaultdict(list)

    def send(self, process: StageProcess, message: Any) -> bool:
        self.sent[process].append(message)
        return process.loaded

    def aborted(self) -> bool:
        return all(isinstance(self.sent[process][-1], Abort) for process in self.processes)


class Open:
    """A table with one request that brought media."""

    def __init__(self, *, timeout_s: float = 60, late_s: float = 0) -> None:
        self.stages = Stages()
        self.router = Router({"thinker": 4, "talker": 4, "code2wav": 4})
        self.table = RequestTable(cast(Supervisor, self.stages), self.router)
        self.lease = FakeLease(())
        self.reports: list[StageReport] = []
        arrival = asyncio.get_running_loop().time() - late_s
        self.request = dataclasses.replace(
            generation_request("r"), lease=self.lease, arrival=arrival, on_stage=self.reports.append
        )
        self.stream: RequestStream = self.table.open(
            self.request, admit(self.request, DEPLOY, CONFIG), self.hosts, timeout_s
        )

    @property
    def hosts(self) -> dict[StageKind, StageProcess]:
        return {"thinker": self.stages.text, "talker": self.stages.speech, "code2wav": self.stages.speech}

    def told(self) -> dict[str, str]:
        """Outcome by stage; each is told once."""
        told = {report.stage: report.outcome for report in self.reports}
        assert len(told) == len(self.reports)
        return dict(told)


async def test_a_request_that_is_done_lets_go_at_once() -> None:
    one = Open()
    one.table.advance(SpeechOutput(request_id="r", num_frames=1, finish_reason="stop"), b"")
    one.table.advance(AudioOutput(request_id="r", seq=0, num_frames=1, final=True), b"")
    assert one.lease.closed == 0
    one.table.advance(TextOutput(request_id="r", seq=0, text="a", num_tokens=1, finish_reason="stop"), b"")
    assert one.lease.closed == 1
    await one.stream.aclose()
    one.table.close()
    assert one.lease.closed == 1


@pytest.mark.parametrize("ending", ["left", "cancelled", "failed", "shut down"])
async def test_an_aborted_request_lets_go_when_the_last_stage_has(ending: str) -> None:
    one = Open()
    match ending:
        case "left":
            await one.stream.aclose()
        case "cancelled":
            one.table.cancel("r")
        case "failed":
            one.table.advance(Failed(request_id="r", stage="thinker", message="no"), b"")
        case "shut down":
            one.table.fail_all(StageError("over", "thinker"))
    assert one.stages.aborted() and one.lease.closed == 0
    one.table.freed("r", one.stages.speech, "talker", "code2wav")
    assert one.lease.closed == 0
    one.table.freed("r", one.stages.text, "thinker")
    assert one.lease.closed == 1
    one.table.close()
    assert one.lease.closed == 1


async def test_the_death_of_a_stage_frees_what_it_held() -> None:
    one = Open()
    text, speech = one.stages.processes
    text.loaded = False
    one.table.lose(text, "killed")
    assert one.lease.closed == 0  # the other process still answers
    speech.loaded = False
    one.table.lose(speech, "killed")
    assert one.lease.closed == 1
    with pytest.raises(StageError):
        await anext(aiter(one.stream))


async def test_what_a_process_frees_of_other_replicas_does_not_count() -> None:
    one = Open()
    other = process("speech:1", "talker", "code2wav", replica=1)
    one.table.cancel("r")
    one.table.freed("r", one.stages.text, "thinker")
    one.table.freed("r", other, "talker", "code2wav")
    assert one.lease.closed == 0 and one.table.num_freeing == 1
    one.table.freed("r", one.stages.speech, "talker", "code2wav")
    assert one.lease.closed == 1


async def test_only_the_replicas_of_a_request_hear_of_it_and_take_it_down() -> None:
    one = Open()
    other = process("speech:1", "talker", "code2wav", replica=1)
    request = generation_request("s")
    hosts = {**one.hosts, "code2wav": other}
    stream = one.table.open(request, admit(request, DEPLOY, CONFIG), hosts, 60)
    assert [message.request_id for message in one.stages.sent[other]] == ["s"]
    route = Route(thinker="thinker", talker="talker", code2wav="code2wav:1")
    announced = [message for messages in one.stages.sent.values() for message in messages if message.request_id == "s"]
    assert [message.route for message in announced] == [route] * 3
    one.table.lose(other, "killed")
    with pytest.raises(StageError, match=r"stage code2wav \(process 'speech:1'\) went down: killed"):
        await anext(aiter(stream))
    assert one.table.num_running == 1, "the request on the first replica goes on"
    assert {name: one.router.num_requests(name) for name in ("talker", "code2wav", "code2wav:1")} == {
        "talker": 1,
        "code2wav": 1,
        "code2wav:1": 0,
    }


async def test_a_stage_that_is_done_has_no_work_left_while_the_others_go_on() -> None:
    one = Open()
    assert (one.router.work("thinker"), one.router.work("talker"), one.router.work("code2wav")) == (15, 110, 110)
    one.table.advance(TextOutput(request_id="r", seq=0, text="a", num_tokens=1, finish_reason="stop"), b"")
    assert (one.router.work("thinker"), one.router.work("talker"), one.router.work("code2wav")) == (0, 110, 110)
    one.table.advance(SpeechOutput(request_id="r", num_frames=1, finish_reason="stop"), b"")
    assert (one.router.work("talker"), one.router.work("code2wav")) == (0, 110)
    one.table.advance(AudioOutput(request_id="r", seq=0, num_frames=1, final=True), b"")
    assert one.router.work("code2wav") == 0 and one.table.num_running == 0


async def test_with_no_stage_left_to_tell_it_lets_go_at_once() -> None:
    one = Open()
    for process in one.stages.processes:
        process.loaded = False
    one.table.cancel("r")
    assert one.lease.closed == 1 and one.table.num_freeing == 0


async def test_a_stage_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "FREE_S", 0.01)
    one = Open()
    one.table.cancel("r")
    assert one.lease.closed == 0
    await asyncio.wait_for(until(lambda: one.lease.closed), 5)
    assert one.lease.closed == 1


async def test_the_end_of_the_table_lets_go_of_what_is_being_freed() -> None:
    one = Open()
    one.table.cancel("r")
    one.table.close()
    assert one.lease.closed == 1


async def test_an_id_in_use_leaves_the_lease_to_the_caller() -> None:
    one = Open()
    other = dataclasses.replace(one.request, lease=FakeLease(()))
    with pytest.raises(RequestError, match="in use"):
        one.table.open(other, admit(other, DEPLOY, CONFIG), one.hosts, 60)
    assert cast(FakeLease, other.lease).closed == one.lease.closed == 0


@pytest.mark.parametrize(("late_s", "passes"), [(59.99, True), (0, False)])
async def test_the_deadline_counts_from_the_arrival(late_s: float, passes: bool) -> None:
    one = Open(timeout_s=60, late_s=late_s)
    event: asyncio.Task[Any] = asyncio.ensure_future(anext(aiter(one.stream)))
    done, _ = await asyncio.wait({event}, timeout=0.1)
    assert bool(done) == passes
    if passes:
        assert isinstance(event.exception(), DeadlineError) and isinstance(event.exception(), TriptychError)
    event.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# --- what is told of stages ---


async def test_a_stage_that_finishes_is_told_with_its_times_and_what_it_made() -> None:
    one = Open()
    times = {kind: StageTimes(ready=float(number)) for number, kind in enumerate(("thinker", "talker", "code2wav"))}
    text = TextOutput(request_id="r", seq=0, text="a", num_tokens=3, finish_reason="length", times=times["thinker"])
    one.table.advance(text, b"")
    assert one.told() == {"thinker": "finished"}
    speech = SpeechOutput(request_id="r", num_frames=2, finish_reason="stop", times=times["talker"])
    one.table.advance(speech, b"")
    one.table.advance(AudioOutput(request_id="r", seq=0, num_frames=1, final=False), b"")
    one.table.advance(AudioOutput(request_id="r", seq=1, num_frames=1, final=True, times=times["code2wav"]), b"")
    assert one.told() == dict.fromkeys(times, "finished")
    assert {report.stage: report.times for report in one.reports} == times
    assert [report.num_tokens for report in one.reports] == [3, 2, 2]
    assert [report.finish_reason for report in one.reports] == ["length", "stop", None]
    assert all(report.announced <= report.ended for report in one.reports)


async def test_stages_that_are_aborted_are_told_when_they_say_so_and_finished_ones_not_again() -> None:
    one = Open()
    one.table.advance(TextOutput(request_id="r", seq=0, text="a", num_tokens=1, finish_reason="stop"), b"")
    await one.stream.aclose()
    assert one.told() == {"thinker": "finished"}
    one.table.freed("r", one.stages.text, "thinker")
    one.table.freed("r", one.stages.speech, "talker", times=StageTimes(ready=1.0, started=0.5))
    assert one.told() == {"thinker": "finished", "talker": "aborted"}
    assert one.reports[-1].times == StageTimes(ready=1.0, started=0.5)
    one.table.freed("r", process("speech:1", "talker", "code2wav", replica=1), "code2wav")
    one.table.freed("r", one.stages.speech, "code2wav")
    assert one.told() == {"thinker": "finished", "talker": "aborted", "code2wav": "aborted"}


async def test_a_stage_that_fails_a_request_is_told_so_and_the_others_are_aborted() -> None:
    one = Open()
    one.table.advance(Failed(request_id="r", stage="talker", message="no", times=StageTimes(ready=2.0)), b"")
    assert one.told() == {"talker": "failed"} and one.reports[0].times == StageTimes(ready=2.0)
    one.table.freed("r", one.stages.text, "thinker")
    one.table.freed("r", one.stages.speech, "talker")
    one.table.freed("r", one.stages.speech, "code2wav")
    assert one.told() == {"talker": "failed", "thinker": "aborted", "code2wav": "aborted"}


async def test_what_dies_with_its_process_has_failed() -> None:
    one = Open()
    one.stages.speech.loaded = False
    one.table.lose(one.stages.speech, "killed")
    assert one.told() == {"talker": "failed", "code2wav": "failed"}
    one.stages.text.loaded = False
    one.table.lose(one.stages.text, "killed")
    assert one.told() == {"talker": "failed", "code2wav": "failed", "thinker": "aborted"}


async def test_a_stage_that_cannot_say_so_is_told_to_be_aborted() -> None:
    one = Open()
    one.stages.text.loaded = False
    one.table.cancel("r")
    assert one.told() == {"thinker": "aborted"}
    one.table.close()
    assert one.told() == dict.fromkeys(("thinker", "talker", "code2wav"), "aborted")
