"""One contract, every kind of connector; then what each of them promises beyond it."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from triptych.config.schema import ConnectorConfig, ConnectorExtra, ConnectorKind
from triptych.connectors import receiver as receiver_module
from triptych.connectors import segments
from triptych.connectors.contract import Array, Handoff
from triptych.connectors.endpoint import Endpoint
from triptych.connectors.message import ArrayHeader, Credit, Put, Refuse, encode
from triptych.connectors.outlet import Outlet
from triptych.connectors.receiver import EdgeReceiver
from triptych.connectors.sender import EdgeSender
from triptych.errors import ConfigError, ConnectorClosed, ConnectorError, SequenceGap

WINDOW = 4
DEADLINE_S = 5.0
CLOSING_S = 0.05  # ZeroMQ closes sockets in a thread of its own; a new process takes longer than that to come up


def codes(value: int = 0, frames: int = 2) -> dict[str, Array]:
    return {"codes": np.full((frames, 16), value, np.int32)}


@dataclass
class Machine:
    """Processes of one server, all of them in this one, and the shared memory they leave."""

    run_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=f"triptych-{os.getpid()}x")))
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    @property
    def token(self) -> str:
        return segments.token_of(str(self.run_dir))

    @property
    def peers(self) -> dict[str, str]:
        return {name: f"ipc://{self.run_dir}/{name}.sock" for name in ("talker", "wave")}

    def start(self, process: str, **options: Any) -> Endpoint:
        endpoint = Endpoint(process=process, run_dir=str(self.run_dir), peers=self.peers, **options)
        self.endpoints[process] = endpoint
        return endpoint

    def segments(self) -> list[str]:
        return [name for name in os.listdir(segments.DIRECTORY) if f"triptych-{self.token}-" in name]

    def wait(self) -> None:
        """Until something has come for any process, then hand it out."""
        poller = zmq.Poller()
        for endpoint in self.endpoints.values():
            poller.register(endpoint.socket, zmq.POLLIN)
        poller.poll(100)
        for endpoint in self.endpoints.values():
            endpoint.pump()

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()
        shutil.rmtree(self.run_dir)
        assert self.segments() == []


@dataclass
class Edge:
    """Both halves of an edge, and everything that came out of them and was not looked at."""

    machine: Machine
    sender: EdgeSender
    receiver: EdgeReceiver
    items: list[Handoff | tuple[str, Exception]] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    num_marks: int = 0

    def until(self, condition: Callable[[], bool]) -> None:
        started = time.monotonic()
        self.collect()
        while not condition():
            assert time.monotonic() - started < DEADLINE_S, "this never came"
            self.machine.wait()
            self.collect()

    def collect(self) -> None:
        self.items += self.receiver.receive()
        self.named += self.sender.writable()

    def take(self, count: int) -> list[Handoff]:
        """The next `count` items, which must be handoffs, and no more than that."""
        self.until(lambda: len(self.items) >= count)
        items, self.items = self.items, []
        assert len(items) == count
        return [item for item in items if isinstance(item, Handoff)]

    def settle(self) -> None:
        """A request goes there and back, so everything that was on its way before has arrived, on both sides."""
        self.num_marks += 1
        mark = f"mark{self.num_marks}"
        items, named = self.items, self.named
        self.items, self.named = [], []
        self.sender.open(mark)
        self.receiver.open(mark)
        while self.sender.try_put(mark, codes()):
            continue
        released = 0
        while mark not in self.named:
            self.until(lambda: mark in self.named or any(is_of(item, mark) for item in self.items))
            for item in [item for item in self.items if is_of(item, mark)]:
                assert isinstance(item, Handoff)
                self.items.remove(item)
                self.receiver.release(item)
                released += 1
        self.named.remove(mark)
        self.sender.close(mark)
        self.receiver.close(mark)
        assert released
        self.items, self.named = items + self.items, named + self.named

    def assert_nothing_held(self) -> None:
        self.settle()
        assert (self.items, self.named) == ([], [])
        self.until(lambda: not self.sender._requests and not self.receiver._requests)
        assert not self.sender._blocked and not self.sender._writable
        assert not self.receiver._unopened and not self.receiver._arrived and not self.receiver._stalled_since
        assert not self.receiver._owed and self.receiver._num_owed == 0
        assert self.machine.segments() == []


def is_of(item: Handoff | tuple[str, Exception], request_id: str) -> bool:
    return (item.request_id if isinstance(item, Handoff) else item[0]) == request_id


def connect(machine: Machine, kind: ConnectorKind = "shm", *, inline_bytes: int = 65536, **extra: Any) -> Edge:
    config = ConnectorConfig(kind=kind, extra=ConnectorExtra(**{"window": WINDOW, **extra}, inline_bytes=inline_bytes))
    source, target = ("talker", "wave") if kind == "shm" else ("wave", "wave")
    halves: list[Any] = []
    for process in dict.fromkeys((source, target)):
        endpoint = machine.endpoints.get(process) or machine.start(process)
        halves += endpoint.edge(
            source="talker", target="code2wav", source_process=source, target_process=target, config=config
        )
    sender, receiver = (half for half in halves if half is not None)
    return Edge(machine, sender, receiver)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()


@pytest.fixture(params=["inproc", "shm", "shm with segments"])
def edge(request: pytest.FixtureRequest, machine: Machine) -> Edge:
    if request.param == "inproc":
        return connect(machine, "inproc")
    return connect(machine, "shm", inline_bytes=0 if "segments" in request.param else 65536)


# --- the contract ---


def test_every_handoff_arrives_equal_and_in_order_and_the_edge_ends_by_itself(edge: Edge) -> None:
    sent: list[dict[str, Array]] = [
        {"codes": np.arange(32, dtype=np.int32).reshape(2, 16)},
        {
            name: np.array([0, 1, 2]).astype(name)
            for name in ("bool", "uint8", "int64", "float16", "float32", "complex64")
        },
        {"empty": np.zeros((0, 16), np.int32), "scalar": np.array(2.5), "last": np.zeros((3, 0), np.int8)},
        {"transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T, "strided": np.arange(10)[::3]},
        {},
        {"codes": np.zeros((0, 16), np.int32)},
    ]
    edge.sender.open("a")
    edge.receiver.open("a")
    for seq, arrays in enumerate(sent):
        assert edge.sender.try_put("a", arrays, final=seq == len(sent) - 1)
        (handoff,) = edge.take(1)
        assert (handoff.request_id, handoff.source, handoff.seq) == ("a", "talker", seq)
        assert handoff.final is (seq == len(sent) - 1)
        assert list(handoff.arrays) == list(arrays)
        for name, array in arrays.items():
            got = handoff.arrays[name]
            assert (got.dtype, got.shape) == (array.dtype, array.shape) and np.array_equal(got, array)
            assert got.flags.c_contiguous
        edge.receiver.release(handoff)
        edge.settle()
    edge.assert_nothing_held()


def test_a_full_window_refuses_and_a_release_is_named_writable_once(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    assert [edge.sender.try_put("a", codes(value)) for value in range(WINDOW + 1)] == [True] * WINDOW + [False]
    handoffs = edge.take(WINDOW)
    edge.settle()
    assert edge.named == [] and not edge.sender.try_put("a", codes(9)), "credit came without a release"
    edge.receiver.release(handoffs[0])
    edge.until(lambda: bool(edge.named))
    edge.settle()
    assert edge.named == ["a"]
    assert edge.sender.try_put("a", codes(WINDOW)) and not edge.sender.try_put("a", codes(9))
    (last,) = edge.take(1)
    assert (last.seq, last.arrays["codes"][0, 0]) == (WINDOW, WINDOW), "what was refused was sent, or took a number"


def test_requests_have_windows_of_their_own(edge: Edge) -> None:
    for request_id in "ab":
        edge.sender.open(request_id)
        edge.receiver.open(request_id)
    while edge.sender.try_put("a", codes()):
        continue
    assert edge.sender.try_put("b", codes(7), final=True)
    assert [item.request_id for item in edge.take(WINDOW + 1)] == ["a"] * WINDOW + ["b"]


def test_release_in_any_order_and_twice_gives_each_credit_once(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    while edge.sender.try_put("a", codes()):
        continue
    handoffs = edge.take(WINDOW)
    for handoff in (handoffs[2], handoffs[0], handoffs[2], handoffs[0]):
        edge.receiver.release(handoff)
    edge.settle()
    assert [edge.sender.try_put("a", codes()) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("held", range(WINDOW))
def test_a_sender_without_credit_gets_every_release_however_many_are_held(edge: Edge, held: int) -> None:
    """Releases may be told in batches, but none may be kept from a sender that waits for it."""
    edge.sender.open("a")
    edge.receiver.open("a")
    sent, kept = 0, 0
    while sent < 20:
        if edge.sender.try_put("a", codes()):
            sent += 1
            continue
        edge.until(lambda: bool(edge.items or edge.named))
        edge.named.clear()
        for item in edge.items:
            assert isinstance(item, Handoff)
            if kept < held:
                kept += 1
            else:
                edge.receiver.release(item)
        edge.items.clear()


def test_a_release_that_was_not_told_at_once_is_told_to_a_sender_that_needs_it(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    edge.sender.try_put("a", codes())
    (first,) = edge.take(1)
    edge.receiver.release(first)
    put = 0
    while put < WINDOW:
        if edge.sender.try_put("a", codes()):
            put += 1
        else:
            edge.until(lambda: bool(edge.named))
            edge.named.clear()
    assert not edge.sender.try_put("a", codes())


def test_a_request_that_is_refused_again_before_its_name_was_read_is_not_named(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    while edge.sender.try_put("a", codes()):
        continue
    edge.receiver.release(edge.take(WINDOW)[0])
    while not edge.sender._writable:
        edge.machine.wait()
    assert edge.sender.try_put("a", codes()) and not edge.sender.try_put("a", codes())
    assert edge.sender.writable() == []


def test_arrays_stay_valid_until_release_and_are_gone_then(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    edge.sender.try_put("a", codes(5))
    (handoff,) = edge.take(1)
    edge.sender.close("a")
    edge.settle()
    assert (handoff.arrays["codes"] == 5).all()
    assert edge.machine.segments() == []
    edge.receiver.release(handoff)
    assert handoff.arrays == {}


def test_what_arrives_before_open_is_kept_in_order(edge: Edge) -> None:
    edge.sender.open("a")
    for value in range(3):
        edge.sender.try_put("a", codes(value), final=value == 2)
    edge.settle()
    assert edge.items == []
    edge.receiver.open("a")
    handoffs = edge.take(3)
    assert [handoff.arrays["codes"][0, 0] for handoff in handoffs] == [0, 1, 2]
    for handoff in handoffs:
        edge.receiver.release(handoff)
    edge.assert_nothing_held()


def test_a_target_that_closes_is_spared_the_rest_and_does_not_park_its_source(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    while edge.sender.try_put("a", codes()):
        continue
    edge.until(lambda: bool(edge.items))
    kept = edge.items[0]
    edge.items.clear()
    for _ in range(2):
        edge.receiver.close("a")
    edge.until(lambda: edge.named == ["a"])
    edge.named.clear()
    assert all(edge.sender.try_put("a", codes()) for _ in range(3 * WINDOW)), "the source waits for nobody"
    assert isinstance(kept, Handoff)
    edge.receiver.release(kept)
    edge.assert_nothing_held()


def test_a_source_that_closes_takes_back_what_is_unread(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    while edge.sender.try_put("a", codes()):
        continue
    for _ in range(2):
        edge.sender.close("a")
    assert edge.machine.segments() == []
    edge.settle()
    assert edge.items == [] and edge.named == []
    assert edge.sender.try_put("a", codes()), "a request that is closed has nobody to wait for"
    edge.receiver.close("a")
    edge.assert_nothing_held()


def test_a_source_that_closes_after_its_final_handoff_takes_nothing_back(edge: Edge) -> None:
    edge.sender.open("a")
    edge.sender.try_put("a", codes(1))
    edge.sender.try_put("a", codes(2), final=True)
    edge.sender.close("a")
    edge.receiver.open("a")
    for handoff in edge.take(2):
        edge.receiver.release(handoff)
    edge.assert_nothing_held()


def test_both_sides_may_close_at_once_or_for_requests_nobody_knows(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    edge.sender.try_put("a", codes())
    for half in (edge.receiver, edge.sender, edge.receiver, edge.sender):
        half.close("a")
        half.close("never")
    edge.assert_nothing_held()


def test_what_comes_for_a_request_that_was_closed_before_is_not_kept(edge: Edge) -> None:
    edge.receiver.close("a")
    edge.sender.open("a")
    edge.sender.try_put("a", codes())
    edge.until(lambda: not edge.sender._requests)
    assert all(edge.sender.try_put("a", codes()) for _ in range(3 * WINDOW))
    edge.assert_nothing_held()


def test_a_request_that_got_credit_and_then_a_refusal_is_still_named(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    while edge.sender.try_put("a", codes()):
        continue
    edge.until(lambda: len(edge.items) == WINDOW)
    for item in edge.items:
        assert isinstance(item, Handoff)
        edge.receiver.release(item)
    edge.items.clear()
    edge.receiver.close("a")
    edge.until(lambda: not edge.sender._requests)
    assert edge.named == ["a"]
    edge.named.clear()
    edge.assert_nothing_held()


def test_a_request_that_its_source_closed_is_not_named(edge: Edge) -> None:
    for request_id in "ab":
        edge.sender.open(request_id)
        edge.receiver.open(request_id)
        while edge.sender.try_put(request_id, codes()):
            continue
    edge.until(lambda: len(edge.items) == 2 * WINDOW)
    edge.items.clear()
    edge.receiver.close("a")
    while "a" in edge.sender._requests:
        edge.machine.wait()
    edge.sender.close("a")
    edge.sender.close("b")
    edge.receiver.close("b")
    edge.assert_nothing_held()


def test_requests_that_are_never_opened_are_bounded_and_let_go_oldest_first(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receiver_module, "UNOPENED_LIMIT", 3)
    for request_id in "abcd":
        edge.sender.open(request_id)
        edge.sender.try_put(request_id, codes(), final=True)
    edge.until(lambda: "a" not in edge.sender._requests)
    assert "'a' sends but was never opened" in caplog.text
    for request_id in "bcd":
        edge.receiver.open(request_id)
    for handoff in edge.take(3):
        edge.receiver.release(handoff)
    edge.assert_nothing_held()


def test_memory_of_closed_requests_is_bounded(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "CLOSED_LIMIT", 10)
    for number in range(50):
        edge.receiver.close(f"r{number}")
        edge.receiver.close(f"r{number}")
    assert list(edge.receiver._closed) == [f"r{number}" for number in range(40, 50)]


def test_misuse_is_told_by_name(edge: Edge) -> None:
    edge.sender.open("a")
    edge.receiver.open("a")
    for half in (edge.sender, edge.receiver):
        with pytest.raises(ConnectorError, match="talker->code2wav: request 'a' was opened twice"):
            half.open("a")
    for array in (np.array([object()]), np.array(["text"]), np.zeros(2, ">i4"), np.zeros(2, [("x", "i4")])):
        with pytest.raises(ConnectorError, match=r"array 'x' is .*; what can travel: bool, int8"):
            edge.sender.try_put("a", {"x": array})
    assert edge.sender.try_put("a", codes(), final=True)
    with pytest.raises(ConnectorError, match="'a' goes on after its final handoff"):
        edge.sender.try_put("a", codes())
    (handoff,) = edge.take(1)
    assert handoff.seq == 0, "a handoff that was refused for its arrays took a number"


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_loses_nothing_mixes_nothing_and_leaves_nothing(edge: Edge, seed: int) -> None:
    rng = random.Random(seed)
    unopened = [f"r{number}" for number in range(40)]
    late: list[str] = []  # at the source before the target has heard of them
    length = {request_id: rng.randint(1, 12) for request_id in unopened}
    sent: dict[str, int] = {}
    got: defaultdict[str, int] = defaultdict(int)
    parked: set[str] = set()
    aborted: set[str] = set()
    waiting: list[Handoff] = []

    def put(request_id: str) -> None:
        seq = sent[request_id]
        value = unopened_number[request_id] * 100 + seq
        if edge.sender.try_put(request_id, codes(value, rng.choice((0, 1, 40))), final=seq == length[request_id] - 1):
            sent[request_id] += 1
            if sent[request_id] == length[request_id]:
                del sent[request_id]
        else:
            parked.add(request_id)

    unopened_number = {request_id: int(request_id[1:]) for request_id in unopened}
    started = time.monotonic()
    while unopened or sent or late or waiting or len(aborted) + sum(got[r] == length[r] for r in length) < 40:
        assert time.monotonic() - started < 20
        choice = rng.random()
        ready = [request_id for request_id in sent if request_id not in parked]
        if choice < 0.1 and unopened:
            request_id = unopened.pop()
            sent[request_id] = 0
            edge.sender.open(request_id)
            late.append(request_id)
        elif choice < 0.2 and late:
            request_id = late.pop(rng.randrange(len(late)))
            edge.receiver.open(request_id)
        elif choice < 0.6 and ready:
            put(rng.choice(ready))
        elif choice < 0.62 and sent:
            request_id = rng.choice(list(sent))
            halves: list[EdgeSender | EdgeReceiver] = [edge.sender, edge.receiver]
            rng.shuffle(halves)
            aborted.add(request_id)
            del sent[request_id]
            if request_id in late:
                late.remove(request_id)
            for half in halves:
                half.close(request_id)
                for endpoint in edge.machine.endpoints.values():
                    endpoint.pump()
            waiting = [handoff for handoff in waiting if handoff.request_id != request_id or rng.random() < 0.5]
        elif choice < 0.8 and waiting:
            edge.receiver.release(waiting.pop(rng.randrange(len(waiting))))
        else:
            for endpoint in edge.machine.endpoints.values():
                endpoint.pump()
            edge.collect()
            parked -= set(edge.named)
            edge.named.clear()
            for item in edge.items:
                assert isinstance(item, Handoff), item
                assert item.request_id not in aborted
                assert item.seq == got[item.request_id]
                assert item.final is (item.seq == length[item.request_id] - 1)
                expected = unopened_number[item.request_id] * 100 + item.seq
                assert (item.arrays["codes"] == expected).all()
                got[item.request_id] += 1
                waiting.append(item)
            edge.items.clear()
    edge.assert_nothing_held()


# --- inproc alone ---


def test_within_a_process_arrays_are_the_same_objects(machine: Machine) -> None:
    edge = connect(machine, "inproc")
    edge.sender.open("a")
    edge.receiver.open("a")
    arrays = codes()
    edge.sender.try_put("a", arrays)
    (handoff,) = edge.receiver.receive()
    assert isinstance(handoff, Handoff) and handoff.arrays["codes"] is arrays["codes"]
    edge.receiver.release(handoff)
    assert list(arrays) == ["codes"], "the source's own mapping was emptied"


# --- the receiving half alone: what no honest sender would send ---


@dataclass
class Recorder:
    """A `Backward` that keeps what it is told."""

    credits: list[dict[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def credit(self, counts: Mapping[str, int]) -> None:
        self.credits.append(dict(counts))

    def refuse(self, request_id: str) -> None:
        self.refused.append(request_id)


@dataclass
class Target:
    window: int = WINDOW
    now: float = 0.0
    back: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        extra = ConnectorExtra(window=self.window, put_timeout_s=5.0)
        self.half = EdgeReceiver(
            edge="talker->code2wav", source="talker", extra=extra, backward=self.back, clock=lambda: self.now
        )

    def accept(self, *seqs: int, request_id: str = "a", final: int = -1) -> None:
        for seq in seqs:
            self.half.accept(request_id, seq, seq == final, codes(seq))


@pytest.mark.parametrize(
    ("seqs", "final", "message"),
    [
        ((1,), -1, "got handoff 1 where handoff 0 was due"),
        ((0, 1, 3), -1, "got handoff 3 where handoff 2 was due"),
        ((0, 1, 1), -1, "got handoff 1 where handoff 2 was due"),
        ((0, 1, 2), 1, "got handoff 2 where the end was due"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_a_gap_a_double_and_a_sequel_end_the_request_with_one_report(
    seqs: tuple[int, ...], final: int, message: str, early: bool
) -> None:
    target = Target()
    if not early:
        target.half.open("a")
    target.accept(*seqs, final=final)
    if early:
        assert target.half.receive() == []
        target.half.open("a")
    (item,) = target.half.receive()
    assert isinstance(item, tuple) and item[0] == "a"
    assert type(item[1]) is SequenceGap and message in str(item[1]) and "'a'" in str(item[1])
    assert "a" in target.back.refused
    target.accept(seqs[-1] + 1, final=final)
    assert target.half.receive() == [] and not target.half._requests


def test_a_double_of_a_finished_request_is_not_kept_as_a_new_one() -> None:
    target = Target()
    target.half.open("a")
    target.accept(0, final=0)
    (handoff,) = target.half.receive()
    assert isinstance(handoff, Handoff)
    target.half.release(handoff)
    target.accept(0, final=0)
    assert not target.half._requests and target.back.refused == ["a"]


def test_a_gap_fails_its_request_alone() -> None:
    target = Target()
    for request_id in "ab":
        target.half.open(request_id)
    target.accept(0, 2)
    target.accept(0, request_id="b")
    gap, handoff = target.half.receive()
    assert isinstance(gap, tuple) and gap[0] == "a"
    assert isinstance(handoff, Handoff) and handoff.request_id == "b"


def test_more_than_a_window_is_refused() -> None:
    target = Target()
    target.half.open("a")
    target.accept(*range(WINDOW + 1))
    (item,) = target.half.receive()
    assert isinstance(item, tuple) and "more than window = 4 on its way" in str(item[1])


def test_a_report_is_not_given_to_a_stage_that_has_closed_the_request() -> None:
    target = Target()
    target.half.open("a")
    target.accept(1)
    target.half.close("a")
    assert target.half.receive() == []


@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_credit_is_batched_but_complete(window: int) -> None:
    target = Target(window=window)
    target.half.open("a")
    for seq in range(100):
        target.accept(seq, final=99)
        (handoff,) = target.half.receive()
        assert isinstance(handoff, Handoff)
        target.half.release(handoff)
    assert sum(counts["a"] for counts in target.back.credits) == 100
    assert len(target.back.credits) <= 1 + 100 / max(1, (window - 1) // 2)


def test_credit_of_many_requests_is_told_after_a_bounded_number_of_releases() -> None:
    """So a sender whose outlet is full is woken by the receiver that empties it."""
    target = Target(window=64)
    for number in range(receiver_module.OWED_LIMIT):
        assert target.back.credits == []
        target.half.open(f"r{number}")
        target.accept(0, request_id=f"r{number}")
        (handoff,) = target.half.receive()
        assert isinstance(handoff, Handoff)
        target.half.release(handoff)
    assert target.back.credits == [{f"r{number}": 1 for number in range(receiver_module.OWED_LIMIT)}]


def test_a_stage_that_takes_nothing_for_put_timeout_s_loses_that_request() -> None:
    target = Target()
    for request_id in "abc":
        target.half.open(request_id)
    target.accept(*range(WINDOW))
    target.accept(*range(WINDOW - 1), request_id="b")
    target.accept(*range(WINDOW), request_id="c")
    kept = {(item.request_id, item.seq): item for item in target.half.receive() if isinstance(item, Handoff)}
    assert len(kept) == 3 * WINDOW - 1
    target.now = 4.9
    target.half.release(kept["c", 0])
    target.accept(WINDOW, request_id="c")
    assert len(target.half.receive()) == 1
    target.now = 5.0
    (item,) = target.half.receive()
    assert isinstance(item, tuple) and item[0] == "a" and type(item[1]) is ConnectorClosed
    assert "nothing of request 'a' was taken for put_timeout_s = 5" in str(item[1])
    assert target.half.receive() == [] and target.back.refused == ["a"]
    target.now = 10.0
    assert [item[0] for item in target.half.receive() if isinstance(item, tuple)] == ["c"]


def test_a_loss_is_reported_unless_the_source_says_that_it_withdraws_the_request() -> None:
    target = Target()
    for request_id in ("withdrawn", "silent"):
        target.half.open(request_id)
    for request_id in ("withdrawn", "silent", "withdrawn early", "early"):
        target.accept(0, request_id=request_id)
        target.half.lose(request_id, ConnectorClosed("gone"))
    for item in target.half.receive():
        assert isinstance(item, Handoff)
        target.half.release(item)
    for request_id in ("withdrawn", "withdrawn early"):
        target.half.withdraw(request_id)
        target.half.lose(request_id, ConnectorClosed("gone"))
    target.now = 4.9
    assert target.half.receive() == []
    target.now = 5.0
    (item,) = target.half.receive()
    assert isinstance(item, tuple) and (item[0], str(item[1])) == ("silent", "gone")
    target.half.open("early")
    (item,) = target.half.receive()
    assert isinstance(item, tuple) and (item[0], str(item[1])) == ("early", "gone")
    assert not target.half._requests and not target.half._stalled_since


# --- shm: what comes from outside ---


@pytest.fixture
def shm(machine: Machine) -> Edge:
    edge = connect(machine, "shm", inline_bytes=0)
    edge.sender.open("good")
    edge.receiver.open("good")
    return edge


NAME = "talker->code2wav"


def put(*arrays: ArrayHeader, edge: str = NAME, segment: str = "") -> bytes:
    return encode(Put(edge, "bad", 0, False, arrays, segment))


def inject(edge: Edge, *frames: bytes, process: str = "wave") -> None:
    """Send raw frames to a process's inbox, and wait until they were read."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(edge.machine.peers[process])
        socket.send_multipart(frames)
        endpoint = edge.machine.endpoints[process]
        assert endpoint.socket.poll(int(DEADLINE_S * 1000)) and endpoint.pump()


def assert_goes_on(edge: Edge) -> None:
    assert edge.sender.try_put("good", codes(3))
    (handoff,) = edge.take(1)
    assert (handoff.arrays["codes"] == 3).all()


@pytest.mark.parametrize(
    ("frames", "process", "message"),
    [
        ([b""], "wave", "cannot be read"),
        ([b"\xc1garbage"], "wave", "cannot be read"),
        ([b"\x91" * 100000], "wave", "cannot be read"),
        ([msgspec.msgpack.encode(["put", NAME])], "wave", "cannot be read"),
        ([msgspec.msgpack.encode(["put", NAME, "bad", -1, False, [], ""]), b""], "wave", "cannot be read"),
        ([msgspec.msgpack.encode(["put", NAME, "bad", 0, False, [["x", "int8", [-1], 0]], ""]), b""], "wave", "cannot"),
        ([msgspec.msgpack.encode(["eval", "print()"])], "wave", "cannot be read"),
        ([put(edge="a->b"), b""], "wave", "'a->b' is no edge to this process"),
        ([put(), b""], "talker", "is no edge to this process"),
        ([encode(Credit(NAME, {"good": 1}))], "wave", "is no edge from this process"),
        ([encode(Refuse(NAME, "good"))], "wave", "is no edge from this process"),
        ([encode(Credit(NAME, {"good": 1})), b"more"], "talker", "a Credit came with 1 frames too many"),
    ],
)
def test_a_message_that_makes_no_sense_is_logged_and_dropped(
    shm: Edge, caplog: pytest.LogCaptureFixture, frames: list[bytes], process: str, message: str
) -> None:
    inject(shm, *frames, process=process)
    assert message in caplog.text and f"process {process} dropped a message" in caplog.text
    assert_goes_on(shm)


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        (put(ArrayHeader("x", "int32", (2, 3), 0)), [bytes(23)], r"'x', int32 [2, 3] from byte 0 on, does not fit"),
        (put(ArrayHeader("x", "int32", (2,), 1)), [bytes(8)], "from byte 1 on, does not fit a payload of 8 bytes"),
        (put(ArrayHeader("x", "int8", (2**62, 2**62), 0)), [bytes(8)], "does not fit"),
        (put(ArrayHeader("x", "int8", (0, 2**62, 2**62), 0)), [bytes(8)], "cannot be"),
        (put(ArrayHeader("x", "int8", (1,) * 100, 0)), [bytes(8)], "cannot be"),
        (put(ArrayHeader("x", "object", (1,), 0)), [bytes(8)], "has dtype 'object'; allowed: bool"),
        (put(ArrayHeader("x", "O", (1,), 0)), [bytes(8)], "has dtype 'O'"),
        (put(), [], "came with 0 payloads"),
        (put(), [b"", b""], "came with 2 payloads"),
        (put(segment="/etc/passwd"), [], "'/etc/passwd' is no shared memory of process 'talker'"),
        (put(segment="../../etc/passwd"), [], "is no shared memory of process 'talker'"),
    ],
)
def test_a_handoff_that_contradicts_itself_fails_its_request_alone(
    shm: Edge, caplog: pytest.LogCaptureFixture, header: bytes, payload: list[bytes], message: str
) -> None:
    shm.receiver.open("bad")
    inject(shm, header, *payload)
    (item,) = shm.receiver.receive()
    assert isinstance(item, tuple) and item[0] == "bad" and type(item[1]) is ConnectorError
    assert message in str(item[1]) and "handoff 0 of request 'bad' is lost" in caplog.text
    assert_goes_on(shm)


def test_a_segment_smaller_than_its_arrays_fails_its_request_alone(shm: Edge) -> None:
    name = segments.SegmentWriter(shm.machine.token, "talker").write([(0, bytes(10))])
    shm.receiver.open("bad")
    inject(shm, put(ArrayHeader("x", "int32", (3,), 0), segment=name))
    (item,) = shm.receiver.receive()
    assert isinstance(item, tuple) and "does not fit a payload of 10 bytes" in str(item[1])
    assert shm.machine.segments() == []
    assert_goes_on(shm)


def test_a_segment_that_is_gone_ends_its_request_with_an_error(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=0, put_timeout_s=0.05)
    for request_id in "ab":
        edge.sender.open(request_id)
        edge.receiver.open(request_id)
        edge.sender.try_put(request_id, codes())
    segments.sweep(machine.token, "talker")
    edge.sender.try_put("b", codes())
    edge.until(lambda: len(edge.items) == 2)
    gap, gone = edge.items
    assert isinstance(gap, tuple) and gap[0] == "b" and type(gap[1]) is SequenceGap, "the next handoff shows the loss"
    assert isinstance(gone, tuple) and gone[0] == "a" and type(gone[1]) is ConnectorClosed
    assert "handoff 0 of request 'a' is lost: its shared memory" in str(gone[1])
    assert_goes_on_with(edge, "c")


def assert_goes_on_with(edge: Edge, request_id: str) -> None:
    edge.items.clear()
    edge.sender.open(request_id)
    edge.receiver.open(request_id)
    assert edge.sender.try_put(request_id, codes(8), final=True)
    (handoff,) = edge.take(1)
    assert handoff.request_id == request_id and (handoff.arrays["codes"] == 8).all()
    edge.receiver.release(handoff)


def test_a_mapping_that_fails_ends_its_request_with_an_error(shm: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    shm.sender.open("a")
    shm.receiver.open("a")
    shm.sender.try_put("a", codes())
    monkeypatch.setattr(segments, "take", refuse)
    shm.until(lambda: bool(shm.items))
    monkeypatch.undo()
    (item,) = shm.items
    assert isinstance(item, tuple) and "Too many open files" in str(item[1])
    shm.until(lambda: "a" not in shm.sender._requests)
    assert shm.machine.segments() == [], "the source was told and takes its memory back"
    assert_goes_on_with(shm, "b")


# --- shm: shared memory ---


def test_only_payloads_over_inline_bytes_use_shared_memory(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=128)
    edge.sender.open("a")
    edge.sender.try_put("a", {"x": np.zeros(128, np.uint8)})
    assert machine.segments() == []
    edge.sender.try_put("a", {"x": np.zeros(129, np.uint8)})
    assert len(machine.segments()) == 1
    edge.receiver.open("a")
    assert len(edge.take(2)) == 2 and machine.segments() == []


def test_arrays_of_a_handoff_can_be_written_and_outlive_the_sender(machine: Machine) -> None:
    """Private pages: torch takes the arrays without a complaint, and nobody else sees what is written."""
    for inline_bytes in (0, 65536):
        edge = connect(machine, "shm", inline_bytes=inline_bytes) if inline_bytes == 0 else edge_inline(machine)
        edge.sender.open("a")
        edge.receiver.open("a")
        edge.sender.try_put("a", codes(1))
        (handoff,) = edge.take(1)
        array = handoff.arrays["codes"]
        array[0] = 9
        edge.receiver.release(handoff)
        assert (array[0] == 9).all() and (array[1] == 1).all()


def edge_inline(machine: Machine) -> Edge:
    for endpoint in machine.endpoints.values():
        endpoint.close()
    machine.endpoints.clear()
    return connect(machine, "shm")


def test_without_room_for_a_segment_the_payload_takes_the_socket(
    shm: Edge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pwrite(fd: int, piece: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    for value in range(2):
        assert shm.sender.try_put("good", codes(value))
    assert [handoff.arrays["codes"][0, 0] for handoff in shm.take(2)] == [0, 1]
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "told once"
    assert "No space left" in caplog.text and "--shm-size" in caplog.text
    assert shm.machine.segments() == []


# --- shm: a full pipe, a peer that is away, a peer that died ---


def half_of(endpoint: Endpoint, **extra: Any) -> Any:
    halves = endpoint.edge(
        source="talker",
        target="code2wav",
        source_process="talker",
        target_process="wave",
        config=ConnectorConfig(kind="shm", extra=ConnectorExtra(**extra)),
    )
    return next(half for half in halves if half is not None)


@pytest.mark.parametrize("inline_bytes", [0, 65536])
def test_a_full_pipe_refuses_and_loses_nothing(machine: Machine, inline_bytes: int) -> None:
    sender = half_of(machine.start("talker", high_water_mark=3), inline_bytes=inline_bytes)
    sender.open("a")
    sent = 0
    while sender.try_put("a", codes(sent)):
        sent += 1
    assert 0 < sent < 10, "nobody listens yet and the window is 64, so only the pipe can have refused"
    assert len(machine.segments()) == (sent if inline_bytes == 0 else 0), "a refused handoff has left its memory"
    machine.endpoints["talker"].pump()
    assert sender.writable() == []
    edge = Edge(machine, sender, half_of(machine.start("wave"), inline_bytes=inline_bytes))
    edge.receiver.open("a")
    while sent < 30:
        edge.until(lambda: "a" in edge.named)
        edge.named.clear()
        while sent < 30 and sender.try_put("a", codes(sent), final=sent == 29):
            sent += 1
    handoffs = edge.take(30)
    assert [handoff.arrays["codes"][0, 0] for handoff in handoffs] == list(range(30))
    for handoff in handoffs:
        edge.receiver.release(handoff)
    edge.until(lambda: not sender._requests)
    assert machine.segments() == []


def test_credit_and_ends_survive_a_full_pipe(machine: Machine) -> None:
    """A pipe that is full of handoffs in one direction must not cost the other edge its credit."""
    talker, wave = machine.start("talker", high_water_mark=2), machine.start("wave", high_water_mark=2)
    back = ConnectorConfig(kind="shm", extra=ConnectorExtra(window=1000, inline_bytes=10**7))
    edge = Edge(machine, half_of(talker, window=1), half_of(wave, window=1))
    other, _ = wave.edge(source="code2wav", target="echo", source_process="wave", target_process="talker", config=back)
    talker.edge(source="code2wav", target="echo", source_process="wave", target_process="talker", config=back)
    assert other is not None
    edge.sender.open("a")
    edge.receiver.open("a")
    assert edge.sender.try_put("a", codes()) and not edge.sender.try_put("a", codes())
    assert wave.socket.poll(3000) and wave.pump()
    (handoff,) = edge.receiver.receive()
    assert isinstance(handoff, Handoff)
    other.open("flood")
    while other.try_put("flood", {"x": np.zeros(10**6, np.uint8)}):
        continue
    edge.receiver.release(handoff)
    edge.receiver.close("a")
    edge.until(lambda: not edge.sender._requests)
    assert edge.named == ["a"]


def test_a_receiver_that_died_takes_credit_and_memory_with_it(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=0)
    for request_id in ("read", "unread", "parked"):
        edge.sender.open(request_id)
        edge.receiver.open(request_id)
    edge.sender.try_put("read", codes())
    edge.take(1)
    edge.sender.try_put("unread", codes(), final=True)
    while edge.sender.try_put("parked", codes()):
        continue
    assert len(machine.segments()) == 1 + WINDOW
    machine.endpoints["wave"].close()
    edge.sender.try_put("read", codes(6))  # the server has not told of the death yet
    machine.endpoints["talker"].reset_peer("wave")
    assert machine.segments() == [] and edge.sender.writable() == ["parked"]
    assert edge.sender.try_put("read", codes()), (
        "what is put for a request that is lost goes nowhere, and waits for none"
    )

    time.sleep(CLOSING_S)
    successor = half_of(machine.start("wave"), window=WINDOW)
    assert_goes_on_with(Edge(machine, edge.sender, successor), "new")
    assert not successor._requests, "the successor got what its predecessor had not read"


def test_a_sender_that_died_takes_its_unread_handoffs_with_it(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=0)
    for request_id in ("unread", "held", "early", "coming"):
        edge.sender.open(request_id)
        if request_id != "early":
            edge.receiver.open(request_id)
    edge.sender.try_put("held", codes(4))
    (held,) = edge.take(1)
    edge.sender.try_put("unread", codes())
    edge.sender.try_put("early", codes())
    machine.endpoints["wave"].socket.poll(3000)
    machine.endpoints["wave"].pump()
    edge.sender.try_put("coming", codes())
    assert machine.endpoints["wave"].socket.poll(3000)
    machine.endpoints["talker"].close()  # its last message is in our inbox, and its segment is gone
    machine.endpoints["wave"].reset_peer("talker")
    assert edge.receiver.receive() == [] and machine.segments() == []
    assert (held.arrays["codes"] == 4).all(), "what a stage holds stays valid"

    successor = half_of(machine.start("talker"), window=WINDOW, inline_bytes=0)
    edge = Edge(machine, successor, edge.receiver)
    assert_goes_on_with(edge, "new")
    edge.receiver.release(held)
    for request_id in ("unread", "held", "early", "coming"):
        edge.receiver.close(request_id)
    edge.assert_nothing_held()


def test_a_reset_that_comes_late_leaves_what_the_successor_has_sent_to_others(machine: Machine) -> None:
    """A process that loads hears of a death when it has loaded; the successor may serve others by then."""
    machine.start("wave")
    sent = segments.SegmentWriter(machine.token, "talker").write([(0, b"x")])
    machine.endpoints["wave"].reset_peer("talker")
    assert machine.segments() == [sent]
    segments.unlink(sent)


def test_what_is_posted_to_a_full_pipe_keeps_its_place_and_is_dropped_by_a_reset(machine: Machine) -> None:
    address = f"ipc://{machine.run_dir}/slow.sock"
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        outlet = Outlet(context, address, 1)
        while outlet.send([b"sent"]):
            continue
        outlet.post(b"lost")
        outlet.reset()
        time.sleep(CLOSING_S)
        while outlet.send([b"early"]):
            continue
        outlet.post(b"posted")
        assert not outlet.drained()
        inbox.bind(address)
        received: list[bytes] = []
        started, sent = time.monotonic(), False
        while b"late" not in received and time.monotonic() - started < DEADLINE_S:
            sent = sent or outlet.send([b"late"])
            if inbox.poll(20):
                received.append(inbox.recv())
        outlet.reset()
        assert list(dict.fromkeys(received)) == [b"early", b"posted", b"late"]
        assert received.count(b"posted") == 1


def test_reset_of_one_peer_leaves_the_edges_to_others_alone(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=0)
    edge.sender.open("a")
    edge.receiver.open("a")
    edge.sender.try_put("a", codes())
    machine.endpoints["talker"].reset_peer("stranger")
    machine.endpoints["wave"].reset_peer("stranger")
    assert len(edge.take(1)) == 1
    with pytest.raises(ConnectorError, match="'wave' was told that it has died itself"):
        machine.endpoints["wave"].reset_peer("wave")


def test_an_edge_may_go_from_a_process_to_itself(machine: Machine) -> None:
    endpoint = machine.start("talker")
    config = ConnectorConfig(kind="shm", extra=ConnectorExtra(window=WINDOW, inline_bytes=0))
    sender, receiver = endpoint.edge(
        source="talker", target="code2wav", source_process="talker", target_process="talker", config=config
    )
    assert isinstance(sender, EdgeSender) and isinstance(receiver, EdgeReceiver)
    edge = Edge(machine, sender, receiver)
    assert_goes_on_with(edge, "a")
    edge.assert_nothing_held()


# --- set-up ---


def test_only_the_halves_of_this_process_are_made(machine: Machine) -> None:
    machine.start("wave")
    edge = machine.endpoints["wave"].edge
    shm, inproc = ConnectorConfig(kind="shm"), ConnectorConfig(kind="inproc")
    sender, receiver = edge(source="a", target="b", source_process="talker", target_process="wave", config=shm)
    assert sender is None and receiver is not None
    assert edge(source="b", target="c", source_process="talker", target_process="talker", config=shm) == (None, None)
    assert edge(source="c", target="d", source_process="talker", target_process="talker", config=inproc) == (None, None)


@pytest.mark.parametrize(
    ("source", "target", "kind", "message"),
    [
        ("talker", "wave", "inproc", "is inproc, but goes from process 'talker' to 'wave'; use kind: shm"),
        ("nobody", "wave", "shm", "process 'nobody' has no address"),
        ("wave", "nobody", "shm", "process 'nobody' has no address"),
    ],
)
def test_an_edge_that_cannot_be_is_a_config_error(
    machine: Machine, source: str, target: str, kind: ConnectorKind, message: str
) -> None:
    config = ConnectorConfig(kind=kind)
    with pytest.raises(ConfigError, match=message):
        machine.start("wave").edge(source="x", target="y", source_process=source, target_process=target, config=config)


def test_an_edge_is_made_once(machine: Machine) -> None:
    endpoint = machine.start("wave")
    half_of(endpoint)
    with pytest.raises(ConfigError, match="talker->code2wav was made before"):
        half_of(endpoint)


def test_an_endpoint_that_cannot_listen_says_why(tmp_path: Path) -> None:
    long = f"ipc:///tmp/{'x' * 110}"
    with pytest.raises(ConfigError, match=r"longer than a socket's path may be \(107 bytes\)"):
        Endpoint(process="a", run_dir="/tmp/r", peers={"a": "ipc:///tmp/r/a", "b": long})
    with pytest.raises(ConfigError, match="process 'c' has no address; there is one for 'a', 'b'"):
        Endpoint(process="c", run_dir="/tmp/r", peers={"a": "ipc:///x", "b": "ipc:///y"})
    with pytest.raises(ConfigError, match=r"process 'a' cannot listen at ipc:///no/such/place/a\.sock"):
        Endpoint(process="a", run_dir="/tmp/r", peers={"a": "ipc:///no/such/place/a.sock"})


def test_close_is_idempotent_and_takes_unread_memory_along(machine: Machine) -> None:
    edge = connect(machine, "shm", inline_bytes=0)
    edge.sender.open("a")
    edge.sender.try_put("a", codes())
    assert len(machine.segments()) == 1
    for _ in range(2):
        machine.endpoints["talker"].close()
    assert machine.segments() == []
    del machine.endpoints["talker"]
