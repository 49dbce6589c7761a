"""The loop of a stage process: whom it steps, when it sleeps, and what it never loses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.fake_stages import deploy_config
from triptych.config.sampling import SamplingParams
from triptych.config.schema import StageKind
from triptych.connectors.wire import (
    Abort,
    Configure,
    Freed,
    Grant,
    Heartbeat,
    LoadProgress,
    PeerRestarted,
    Shutdown,
    StageStats,
    SubmitCodec,
    SubmitSpeech,
    SubmitText,
    TextOutput,
    ToServer,
    ToStage,
    decode_to_server,
    decode_to_stage,
    encode,
)
from triptych.errors import ConnectorClosed, StageError
from triptych.stages import outbox as outbox_module
from triptych.stages.build import connector, report_progress
from triptych.stages.contract import Submit
from triptych.stages.lifeline import Lifeline
from triptych.stages.outbox import Outbox
from triptych.stages.process import ProcessLoop

TEXT = SubmitText(request_id="r", prompt_token_ids=(1,), params=SamplingParams(seed=1), speak=True)
SPEECH = SubmitSpeech(request_id="r", prompt_token_ids=(1,), speaker_id=0, params=SamplingParams(seed=1))
CODEC = SubmitCodec(request_id="r", credit=16)


class ScriptedStage:
    """Does `work` units, and writes down everything that happens to it."""

    def __init__(self, kind: StageKind, diary: list[tuple[str, str]], outbox: Outbox) -> None:
        self.kind = kind
        self.work = 0
        self.polls = 0
        self.on_poll: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self._diary = diary
        self._outbox = outbox

    def submit(self, message: Submit) -> None:
        self._diary.append((self.kind, type(message).__name__))

    def grant(self, message: Grant) -> None:
        self._diary.append((self.kind, "grant"))

    def abort(self, request_id: str) -> None:
        self._diary.append((self.kind, "abort"))

    def poll_inputs(self) -> None:
        self.polls += 1
        self.on_poll()

    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> None:
        self.work -= 1
        self._diary.append((self.kind, "step"))
        self.on_step()

    def stats(self) -> StageStats:
        return StageStats(stage=self.kind)

    def close(self) -> None:
        self._diary.append((self.kind, "close"))


class QuietEndpoint:
    """Connectors on which nothing arrives but what a test sends to `address`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.bind("inproc://inbox")
        self.reset: list[str] = []

    def pump(self) -> bool:
        try:
            self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def reset_peer(self, process: str) -> None:
        self.reset.append(process)


class Bench:
    """One loop with three scripted stages, and the server's end of its control socket."""

    def __init__(self, high_water_mark: int = 1000) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = self.context.socket(zmq.PAIR)
        self.server.setsockopt(zmq.RCVHWM, high_water_mark)
        self.server.bind("inproc://control")
        control = self.context.socket(zmq.PAIR)
        control.setsockopt(zmq.SNDHWM, high_water_mark)
        control.connect("inproc://control")
        self.endpoint = QuietEndpoint(self.context)
        self.outbox = Outbox(control)
        self.diary: list[tuple[str, str]] = []
        kinds: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")
        self.stages = {kind: ScriptedStage(kind, self.diary, self.outbox) for kind in kinds}
        read_end, self.lifeline_end = os.pipe()
        self.lifeline = Lifeline(read_end, grace_s=60, last_resort=lambda: None)
        self.loop = ProcessLoop(
            process="one",
            control=control,
            outbox=self.outbox,
            endpoint=self.endpoint,
            stages=list(self.stages.values()),
            lifeline=self.lifeline,
        )

    def tell(self, *messages: ToStage) -> None:
        for message in messages:
            self.server.send(encode(message))

    def run(self, *messages: ToStage) -> None:
        self.tell(*messages, Shutdown())
        self.loop.run()

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.loop.run)
        thread.start()
        return thread

    def heard(self, wait_ms: int = 0) -> list[ToServer]:
        messages: list[ToServer] = []
        while self.server.poll(0 if messages else wait_ms):
            messages.append(decode_to_server(self.server.recv()))
        return messages

    def close(self) -> None:
        self.lifeline.release()
        if not self.lifeline.cut:
            os.close(self.lifeline_end)
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.close()


def test_each_submission_reaches_its_own_stage(bench: Bench) -> None:
    bench.run(CODEC, SPEECH, TEXT)
    assert bench.diary == [("code2wav", "SubmitCodec"), ("talker", "SubmitSpeech"), ("thinker", "SubmitText")]


def test_an_abort_frees_every_stage_and_each_says_so(bench: Bench) -> None:
    bench.run(Abort(request_id="r"), Abort(request_id="r"))
    assert bench.diary == [("thinker", "abort"), ("talker", "abort"), ("code2wav", "abort")] * 2
    freed = [message for message in bench.heard() if isinstance(message, Freed)]
    assert [message.stage for message in freed] == ["thinker", "talker", "code2wav"] * 2


def test_a_restarted_peer_is_reset(bench: Bench) -> None:
    bench.run(PeerRestarted(process="speech"))
    assert bench.endpoint.reset == ["speech"]


def test_stages_with_work_are_stepped_in_turn_the_last_first_until_none_has_any(bench: Bench) -> None:
    bench.stages["thinker"].work, bench.stages["talker"].work = 3, 2
    bench.stages["thinker"].on_step = lambda: bench.tell(Shutdown()) if bench.stages["thinker"].work == 0 else None
    bench.loop.run()
    steps = [kind for kind, _ in bench.diary]
    assert steps == ["talker", "thinker", "talker", "thinker", "thinker"]


def test_what_a_step_hands_over_is_taken_without_a_wait(bench: Bench) -> None:
    handed: list[int] = []
    thinker, talker = bench.stages["thinker"], bench.stages["talker"]
    thinker.work, thinker.on_step = 1, lambda: handed.append(1)

    def take() -> None:
        if handed:
            talker.work += len(handed)
            handed.clear()

    talker.on_poll = take
    talker.on_step = lambda: bench.tell(Shutdown())
    bench.loop.run()
    assert bench.diary == [("thinker", "step"), ("talker", "step")]


def test_credit_released_by_a_later_stage_wakes_an_earlier_one_without_a_wait(bench: Bench) -> None:
    released: list[int] = []
    thinker, codec = bench.stages["thinker"], bench.stages["code2wav"]

    def take_credit() -> None:
        if released:
            thinker.work += 1
            released.clear()

    def release_once() -> None:
        if codec.polls == 1:
            released.append(1)

    thinker.on_poll, codec.on_poll = take_credit, release_once
    thinker.on_step = lambda: bench.tell(Shutdown())
    started = time.monotonic()
    bench.loop.run()
    assert time.monotonic() - started < 0.5, "the loop slept over work that it had"


def test_what_an_earlier_stage_hands_on_as_it_takes_its_inputs_is_taken_without_a_wait(bench: Bench) -> None:
    """As the Talker does with the end of an answer that has no text."""
    handed: list[int] = []
    talker, codec = bench.stages["talker"], bench.stages["code2wav"]

    def hand_on_once() -> None:
        if talker.polls == 1:
            handed.append(1)

    def take() -> None:
        if handed:
            codec.work += 1
            handed.clear()

    talker.on_poll, codec.on_poll = hand_on_once, take
    codec.on_step = lambda: bench.tell(Shutdown())
    started = time.monotonic()
    bench.loop.run()
    assert time.monotonic() - started < 0.5, "the loop slept over work that it had"


def test_an_idle_loop_sleeps_and_a_busy_one_does_not_forget_its_heartbeat(bench: Bench) -> None:
    thread = bench.start()
    time.sleep(1.3)
    idle_turns = bench.stages["thinker"].polls
    assert idle_turns < 10, "an idle loop turns without a reason"
    assert sum(isinstance(message, Heartbeat) for message in bench.heard()) == 2
    bench.stages["thinker"].on_step = lambda: time.sleep(0.001)
    bench.stages["thinker"].work = 10**6
    bench.tell(Grant(request_id="r", count=1))
    time.sleep(1.2)
    assert bench.stages["thinker"].polls > idle_turns + 100
    assert any(isinstance(message, Heartbeat) for message in bench.heard())
    bench.tell(Shutdown())
    thread.join(timeout=2)
    assert not thread.is_alive()


@pytest.mark.parametrize("waker", ["control", "inbox", "lifeline"])
def test_anything_that_arrives_wakes_an_idle_loop_at_once(bench: Bench, waker: str) -> None:
    thread = bench.start()
    time.sleep(0.1)
    before = bench.stages["thinker"].polls
    if waker == "control":
        bench.tell(Grant(request_id="r", count=1))
    elif waker == "inbox":
        sender = bench.context.socket(zmq.PUSH)
        sender.connect("inproc://inbox")
        sender.send(b"")
        sender.close(linger=1000)
    else:
        os.close(bench.lifeline_end)
    time.sleep(0.2)
    if waker == "lifeline":
        assert not thread.is_alive(), "the server is gone, and the loop goes on"
        return
    assert bench.stages["thinker"].polls > before
    bench.tell(Shutdown())
    thread.join(timeout=2)


def test_a_step_that_raises_ends_the_loop_and_names_its_stage(bench: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("out of cheese")

    bench.stages["talker"].work, bench.stages["talker"].on_step = 1, fail
    with pytest.raises(RuntimeError, match="cheese"):
        bench.loop.run()
    assert bench.loop.stage == "talker"


def test_a_second_configuration_is_an_error(bench: Bench) -> None:
    again = Configure(deploy=deploy_config(), model="m", process="one", run_dir="/r", peers={})
    with pytest.raises(StageError, match="configured twice"):
        bench.run(again)


def test_a_submission_for_a_stage_that_lives_elsewhere_is_an_error(bench: Bench) -> None:
    loop = bench.loop
    loop._by_kind.pop("talker")
    with pytest.raises(StageError, match="process 'one' has no talker"):
        bench.run(SPEECH)


# --- a server that does not read ---


def output(seq: int) -> TextOutput:
    return TextOutput(request_id="r", seq=seq, text="a", num_tokens=1)


def test_a_server_that_does_not_read_stops_the_steps_and_loses_nothing() -> None:
    bench = Bench(high_water_mark=5)
    thinker = bench.stages["thinker"]
    thinker.work = 200
    thinker.on_step = lambda: bench.outbox.send(output(199 - thinker.work))
    thread = bench.start()
    time.sleep(0.3)
    assert thinker.work > 150, "it steps on while its output piles up"
    turns = thinker.polls
    time.sleep(0.2)
    assert thinker.polls - turns < 10, "it spins while it cannot go on"
    heard: list[ToServer] = []
    while sum(isinstance(message, TextOutput) for message in heard) < 200:
        more = bench.heard(wait_ms=1000)
        assert more, "output is missing"
        heard += more
    assert [message.seq for message in heard if isinstance(message, TextOutput)] == list(range(200))
    bench.tell(Shutdown())
    thread.join(timeout=2)
    bench.close()


def test_the_outbox_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "PENDING_LIMIT", 10)
    bench = Bench(high_water_mark=1)
    with pytest.raises(ConnectorClosed, match="not read for 10"):
        for seq in range(100):
            bench.outbox.send(output(seq))
    bench.close()


# --- the lifeline ---


def test_a_process_that_cannot_leave_by_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    order: list[Any] = []

    def leave(status: int) -> None:
        order.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    read_end, write_end = os.pipe()
    lifeline = Lifeline(read_end, grace_s=0.05, last_resort=lambda: order.append("tidy"))
    assert not lifeline.cut
    os.close(write_end)
    assert ended.wait(2) and lifeline.cut and order == ["tidy", 1]


def test_a_process_that_leaves_by_itself_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    read_end, write_end = os.pipe()
    lifeline = Lifeline(read_end, grace_s=0.1, last_resort=lambda: exits.append(-1))
    os.close(write_end)
    lifeline.release()
    time.sleep(0.3)
    assert lifeline.cut and exits == []


# --- building ---


def test_progress_is_reported_a_hundred_times_at_most() -> None:
    sent: list[ToServer] = []

    class List:
        def send(self, message: ToServer, samples: bytes | None = None) -> None:
            sent.append(message)

    report = report_progress("talker", List())
    for done in range(10_001):
        report(done, 10_000)
    assert len(sent) == 101
    assert sent[-1] == LoadProgress(stage="talker", done=10_000, total=10_000)


def test_an_edge_without_a_connector_follows_from_its_processes() -> None:
    named = deploy_config()
    assert connector(named, named.stages[0], named.stages[1]) is named.connectors["edge"]
    shared = deploy_config(processes=("one", "one", "two"))
    assert connector(shared, shared.stages[0], shared.stages[1]).kind == "inproc"
    assert connector(shared, shared.stages[1], shared.stages[2]).kind == "shm"


def test_a_process_gets_the_configuration_that_was_given() -> None:
    configure = Configure(deploy=deploy_config(), model="m", process="text", run_dir="/r", peers={"text": "ipc://x"})
    assert decode_to_stage(encode(configure)) == configure
    with pytest.raises(msgspec.DecodeError):
        decode_to_stage(encode(Freed(request_id="r", stage="talker")))
