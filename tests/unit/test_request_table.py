"""A request's media is held until no stage can want it any more, and let go of once, however the request ends."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from tests.fake_pipeline import FakeLease
from tests.fake_stages import CONFIG, deploy_config, generation_request
from triptych.connectors.wire import Abort, AudioOutput, Failed, SpeechOutput, TextOutput
from triptych.errors import DeadlineError, RequestError, StageError, TriptychError
from triptych.pipeline import request_table
from triptych.pipeline.admission import admit
from triptych.pipeline.request_table import RequestTable
from triptych.pipeline.stage_process import StageProcess
from triptych.pipeline.stream import RequestStream
from triptych.pipeline.supervisor import Supervisor

DEPLOY = deploy_config()


@dataclasses.dataclass(eq=False)
class Process:
    name: str
    stages: tuple[str, ...]
    loaded: bool = True
    sent: list[Any] = dataclasses.field(default_factory=list)


class Stages:
    """Takes what the table sends, in the place of a Supervisor."""

    def __init__(self) -> None:
        self.processes = [Process("text", ("thinker",)), Process("speech", ("talker", "code2wav"))]

    def host(self, kind: str) -> Process:
        return next(process for process in self.processes if kind in process.stages)

    def send(self, process: Process, message: Any) -> bool:
        process.sent.append(message)
        return process.loaded

    def aborted(self) -> bool:
        return all(isinstance(process.sent[-1], Abort) for process in self.processes)


class Open:
    """A table with one request that brought media."""

    def __init__(self, *, timeout_s: float = 60, late_s: float = 0) -> None:
        self.stages = Stages()
        self.table = RequestTable(cast(Supervisor, self.stages))
        self.lease = FakeLease(())
        arrival = asyncio.get_running_loop().time() - late_s
        self.request = dataclasses.replace(generation_request("r"), lease=self.lease, arrival=arrival)
        self.stream: RequestStream = self.table.open(self.request, admit(self.request, DEPLOY, CONFIG), timeout_s)

    def process(self, index: int) -> StageProcess:
        return cast(StageProcess, self.stages.processes[index])


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
    one.table.freed("r", "talker", "code2wav")
    assert one.lease.closed == 0
    one.table.freed("r", "thinker")
    assert one.lease.closed == 1
    one.table.close()
    assert one.lease.closed == 1


async def test_the_death_of_a_stage_frees_what_it_held() -> None:
    one = Open()
    text, speech = one.stages.processes
    text.loaded = False
    one.table.lose(one.process(0), "killed")
    assert one.lease.closed == 0  # the other process still answers
    speech.loaded = False
    one.table.lose(one.process(1), "killed")
    assert one.lease.closed == 1
    with pytest.raises(StageError):
        await anext(aiter(one.stream))


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
        one.table.open(other, admit(other, DEPLOY, CONFIG), 60)
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
