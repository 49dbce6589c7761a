"""Processes that are killed with SIGKILL while payloads lie in shared memory: the other side goes on, nothing is left.

Each peer is a real process that owns one half of the edge `talker->code2wav` and does what its standard input says.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.config.schema import ConnectorConfig, ConnectorExtra
from triptych.connectors import segments
from triptych.connectors.contract import Handoff, Receiver, Sender
from triptych.connectors.endpoint import Endpoint

CONFIG = ConnectorConfig(kind="shm", extra=ConnectorExtra(window=4, inline_bytes=1000))
LARGE = np.arange(50_000, dtype=np.int32)
DEADLINE_S = 5.0

PEER = """
import sys
import numpy as np
from tests.e2e.test_connector_crash import LARGE, connect, put, receive

process, run_dir = sys.argv[1:]
endpoint, half = connect(process, run_dir)
print("ready", flush=True)
for line in sys.stdin:
    command, request_id = line.split()
    if command == "open":
        half.open(request_id)
    elif command in ("put", "end"):
        put(endpoint, half, request_id, final=command == "end")
    elif command == "arrive":
        endpoint.socket.poll(5000)
    elif command == "read":
        handoff = receive(endpoint, half, request_id)
        assert np.array_equal(handoff.arrays["codes"], LARGE)
    elif command == "release":
        half.release(handoff)
        del handoff
    elif command == "close":
        endpoint.close()
    print("done", flush=True)
"""


def connect(process: str, run_dir: str) -> tuple[Endpoint, Any]:
    """The endpoint of `talker` (the source) or `wave` (the target), and its half of the edge."""
    peers = {name: f"ipc://{run_dir}/{name}.sock" for name in ("talker", "wave")}
    endpoint = Endpoint(process=process, run_dir=run_dir, peers=peers)
    halves = endpoint.edge(
        source="talker", target="code2wav", source_process="talker", target_process="wave", config=CONFIG
    )
    return endpoint, next(half for half in halves if half is not None)


def put(endpoint: Endpoint, sender: Sender, request_id: str, *, final: bool = False) -> None:
    """Send one large handoff, as soon as there is credit."""
    started = time.monotonic()
    while not sender.try_put(request_id, {"codes": LARGE}, final=final):
        assert time.monotonic() - started < DEADLINE_S, "no credit came"
        endpoint.socket.poll(100)
        endpoint.pump()


def receive(endpoint: Endpoint, receiver: Receiver, request_id: str) -> Handoff:
    """The next handoff, which must be this request's."""
    started = time.monotonic()
    while time.monotonic() - started < DEADLINE_S:
        for item in receiver.receive():
            assert isinstance(item, Handoff) and item.request_id == request_id, item
            return item
        endpoint.socket.poll(100)
        endpoint.pump()
    raise AssertionError(f"nothing came of {request_id!r}")


@dataclass
class Peer:
    process: str
    run_dir: Path
    popen: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PEER, self.process, str(self.run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._answer() == "ready"

    def do(self, command: str, request_id: str = "a") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{command} {request_id}\n")
        self.popen.stdin.flush()
        assert self._answer() == "done", f"{self.process} could not {command}"

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.leave()

    def leave(self) -> None:
        """Wait for its end, which the end of its input brings about if nothing has before."""
        self.popen.communicate(timeout=DEADLINE_S)

    def _answer(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()


@dataclass
class Server:
    """What the supervisor does around the peers: it starts them, sweeps after their death, and looks at the memory."""

    run_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=f"triptych-{os.getpid()}x")))
    peers: list[Peer] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)

    @property
    def token(self) -> str:
        return segments.token_of(str(self.run_dir))

    def spawn(self, process: str) -> Peer:
        self.peers.append(Peer(process, self.run_dir))
        return self.peers[-1]

    def play(self, process: str) -> tuple[Endpoint, Any]:
        endpoint, half = connect(process, str(self.run_dir))
        self.endpoints.append(endpoint)
        return endpoint, half

    def sender(self) -> tuple[Endpoint, Sender]:
        return self.play("talker")

    def receiver(self) -> tuple[Endpoint, Receiver]:
        return self.play("wave")

    def segments(self) -> list[str]:
        return [name for name in os.listdir(segments.DIRECTORY) if name.startswith(f"triptych-{self.token}-")]

    def close(self) -> None:
        for peer in self.peers:
            if peer.popen.poll() is None:
                peer.popen.kill()
            peer.popen.communicate(timeout=DEADLINE_S)
        for endpoint in self.endpoints:
            endpoint.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        segments.sweep(self.token)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_sender_killed_with_unread_payloads_leaves_nothing_and_is_replaced(server: Server) -> None:
    endpoint, receiver = server.receiver()
    talker = server.spawn("talker")
    for request_id in ("held", "unread"):
        receiver.open(request_id)
        talker.do("open", request_id)
    talker.do("put", "held")
    held = receive(endpoint, receiver, "held")
    talker.do("put", "unread")
    talker.do("put", "unread")
    assert endpoint.socket.poll(5000) and len(server.segments()) == 2
    talker.kill()
    segments.sweep(server.token, "talker")
    assert server.segments() == []

    endpoint.reset_peer("talker")
    endpoint.pump()
    assert receiver.receive() == [], "the stage learns from the server, not twice"
    assert np.array_equal(held.arrays["codes"], LARGE), "what was read stays valid"
    receiver.release(held)

    successor = server.spawn("talker")
    receiver.open("new")
    successor.do("open", "new")
    successor.do("end", "new")
    handoff = receive(endpoint, receiver, "new")
    assert (handoff.seq, handoff.final) == (0, True) and np.array_equal(handoff.arrays["codes"], LARGE)
    receiver.release(handoff)
    assert server.segments() == []


def test_a_receiver_killed_before_it_maps_leaves_nothing_and_is_replaced(server: Server) -> None:
    endpoint, sender = server.sender()
    wave = server.spawn("wave")
    wave.do("open")
    sender.open("a")
    while sender.try_put("a", {"codes": LARGE}):
        continue
    wave.do("arrive")
    assert len(server.segments()) == CONFIG.extra.window
    wave.kill()
    segments.sweep(server.token, "wave")
    assert len(server.segments()) == CONFIG.extra.window, "these are the sender's, who does not know yet"
    endpoint.reset_peer("wave")
    assert server.segments() == [] and sender.writable() == ["a"]

    successor = server.spawn("wave")
    successor.do("open", "new")
    sender.open("new")
    for number in range(10):
        put(endpoint, sender, "new", final=number == 9)
        successor.do("read", "new")
        successor.do("release", "new")
    assert server.segments() == []


def test_an_abort_frees_what_a_killed_receiver_had_not_read(server: Server) -> None:
    """The server aborts the requests of a dead process before it tells its peers of the death."""
    endpoint, sender = server.sender()
    wave = server.spawn("wave")
    sender.open("a")
    sender.try_put("a", {"codes": LARGE})
    wave.kill()
    sender.close("a")
    assert server.segments() == []
    endpoint.reset_peer("wave")
    assert server.segments() == []


def test_a_receiver_killed_while_it_holds_a_payload_leaves_nothing(server: Server) -> None:
    endpoint, sender = server.sender()
    wave = server.spawn("wave")
    wave.do("open")
    sender.open("a")
    sender.try_put("a", {"codes": LARGE}, final=True)
    wave.do("read")
    assert server.segments() == [], "the name is gone as soon as the payload is mapped"
    wave.kill()
    endpoint.reset_peer("wave")
    assert server.segments() == []


def test_both_sides_killed_leave_what_one_sweep_of_the_server_removes(server: Server) -> None:
    wave, talker = server.spawn("wave"), server.spawn("talker")
    talker.do("open")
    talker.do("put")
    wave.do("arrive")
    talker.kill()
    wave.kill()
    assert len(server.segments()) == 1
    segments.sweep_stale()
    assert len(server.segments()) == 1, "its server is alive"
    segments.sweep(server.token)
    assert server.segments() == []


def test_a_sender_that_leaves_takes_its_unread_payloads_along(server: Server) -> None:
    server.spawn("wave")
    talker = server.spawn("talker")
    talker.do("open")
    talker.do("put")
    assert len(server.segments()) == 1
    talker.do("close")
    assert server.segments() == []


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says this process has mapped")
def test_a_long_stream_neither_maps_nor_opens_more_and_more(server: Server) -> None:
    endpoint, receiver = server.receiver()
    talker = server.spawn("talker")
    receiver.open("a")
    talker.do("open")
    counts = []
    for number in range(40):
        talker.do("put")
        handoff = receive(endpoint, receiver, "a")
        receiver.release(handoff)
        if number in (9, 39):
            mapped = Path("/proc/self/maps").read_text().count(f"triptych-{server.token}")
            counts.append((mapped, len(os.listdir("/proc/self/fd"))))
    assert counts[0] == counts[1] and counts[0][0] == 0
    assert server.segments() == []
