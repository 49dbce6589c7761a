"""Where a process's edges meet the outside: one inbox, and one outlet for each other process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from triptych.config.schema import ConnectorConfig
from triptych.connectors import inproc, segments
from triptych.connectors.contract import Receiver, Sender
from triptych.connectors.message import Credit, Put, Refuse, Withdraw, decode
from triptych.connectors.outlet import Outlet
from triptych.connectors.receiver import EdgeReceiver
from triptych.connectors.sender import EdgeSender
from triptych.connectors.shm import ShmBackward, ShmForward, unpack
from triptych.errors import ConfigError, ConnectorClosed, ConnectorError

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 4096  # messages in a pipe: more than OWED_LIMIT, so that a full one means credit to come
LONGEST_IPC_PATH = 107  # bytes, of a UNIX domain socket


@dataclass(frozen=True, slots=True)
class _Outbound:
    process: str
    sender: EdgeSender


@dataclass(frozen=True, slots=True)
class _Inbound:
    process: str
    receiver: EdgeReceiver


class Endpoint:
    """The connectors of one OS process.

    `socket` is readable when something has come; `pump` then hands it to the edges. A request that was refused because
    an outlet was full is writable again after the first `pump` that finds room. Nothing is polled for: what wakes the
    loop is the credit that comes back once the far end reads on, or at the latest its next heartbeat.

    Raises ConfigError on an address that is missing, too long or cannot be bound.
    """

    def __init__(
        self, *, process: str, run_dir: str, peers: Mapping[str, str], high_water_mark: int = HIGH_WATER_MARK
    ) -> None:
        if process not in peers:
            raise ConfigError(f"process {process!r} has no address; there is one for {', '.join(map(repr, peers))}")
        for address in peers.values():
            if len(address.removeprefix("ipc://").encode()) > LONGEST_IPC_PATH:
                raise ConfigError(
                    f"{address} is longer than a socket's path may be ({LONGEST_IPC_PATH} bytes); "
                    "set TMPDIR to a shorter directory"
                )
        self._process = process
        self._token = segments.token_of(run_dir)
        self._writer = segments.SegmentWriter(self._token, process)
        self._outbound: dict[str, _Outbound] = {}
        self._inbound: dict[str, _Inbound] = {}
        self._context = zmq.Context()
        self._outlets = {name: Outlet(self._context, address, high_water_mark) for name, address in peers.items()}
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, high_water_mark)
        try:
            self.socket.bind(peers[process])
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"process {process!r} cannot listen at {peers[process]}: {error}") from error

    def edge(
        self, *, source: str, target: str, source_process: str, target_process: str, config: ConnectorConfig
    ) -> tuple[Sender | None, Receiver | None]:
        """The halves of an edge that live in this process; None for one that does not. Raises ConfigError."""
        name = f"{source}->{target}"
        if name in self._outbound or name in self._inbound:
            raise ConfigError(f"edge {name} was made before")
        for process in (source_process, target_process):
            if process not in self._outlets:
                raise ConfigError(f"edge {name}: process {process!r} has no address")
        if config.kind == "inproc":
            if source_process != target_process:
                raise ConfigError(
                    f"edge {name} is inproc, but goes from process {source_process!r} to {target_process!r}; "
                    "use kind: shm, or give both stages the same process"
                )
            return inproc.connect(name, source, config.extra) if source_process == self._process else (None, None)
        sender = receiver = None
        if source_process == self._process:
            forward = ShmForward(
                edge=name,
                outlet=self._outlets[target_process],
                writer=self._writer,
                inline_bytes=config.extra.inline_bytes,
            )
            sender = EdgeSender(edge=name, extra=config.extra, forward=forward)
            self._outbound[name] = _Outbound(target_process, sender)
        if target_process == self._process:
            backward = ShmBackward(edge=name, outlet=self._outlets[source_process])
            receiver = EdgeReceiver(edge=name, source=source, extra=config.extra, backward=backward)
            self._inbound[name] = _Inbound(source_process, receiver)
        return sender, receiver

    def pump(self) -> bool:
        """Hand everything that has arrived to the edges, without waiting. True if anything had.

        A message that makes no sense is logged and dropped; if it was a handoff, its request's receiver reports it.
        """
        came = False
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            came = True
            try:
                self._dispatch(frames)
            except ConnectorError as error:
                logger.error("process %s dropped a message: %s", self._process, error)
        for process, outlet in self._outlets.items():
            if outlet.drained():
                for outbound in self._outbound.values():
                    if outbound.process == process:
                        outbound.sender.retry()
        return came

    def reset_peer(self, process: str) -> None:
        """Another process has died: forget the requests of every edge to and from it.

        What a new process at the same address sends and gets starts from nothing. Its predecessor's segments are for
        the server to remove, before it starts the new one: this may come late, to a process that was loading.
        """
        if process == self._process:
            raise ConnectorError(f"process {process!r} was told that it has died itself")
        for outbound in self._outbound.values():
            if outbound.process == process:
                outbound.sender.reset()
        for inbound in self._inbound.values():
            if inbound.process == process:
                inbound.receiver.reset()
        if process in self._outlets:
            self._outlets[process].reset()

    def close(self) -> None:
        """Close the sockets without waiting for anyone and unlink every segment of this process. Idempotent."""
        for outlet in self._outlets.values():
            outlet.reset()
        self.socket.close(linger=0)
        self._context.term()
        segments.sweep(self._token, self._process)

    def _dispatch(self, frames: list[bytes]) -> None:
        message = decode(frames[0])
        if isinstance(message, Put):
            self._accept(message, frames[1:])
            return
        if len(frames) != 1:
            raise ConnectorError(f"a {type(message).__name__} came with {len(frames) - 1} frames too many")
        match message:
            case Credit(edge=edge, counts=counts):
                self._sender(edge).credit(counts)
            case Refuse(edge=edge, request_id=request_id):
                self._sender(edge).refuse(request_id)
            case Withdraw(edge=edge, request_id=request_id):
                self._receiver(edge).receiver.withdraw(request_id)

    def _accept(self, put: Put, payload: list[bytes]) -> None:
        inbound = self._receiver(put.edge)
        try:
            arrays = unpack(put, payload, token=self._token, source_process=inbound.process)
        except ConnectorError as cause:
            error = type(cause)(f"{put.edge}: handoff {put.seq} of request {put.request_id!r} is lost: {cause}")
            if isinstance(error, ConnectorClosed):
                inbound.receiver.lose(put.request_id, error)
                return
            inbound.receiver.fail(put.request_id, error)
            raise error from cause
        inbound.receiver.accept(put.request_id, put.seq, put.final, arrays)

    def _sender(self, edge: str) -> EdgeSender:
        outbound = self._outbound.get(edge)
        if outbound is None:
            raise ConnectorError(f"{edge!r} is no edge from this process")
        return outbound.sender

    def _receiver(self, edge: str) -> _Inbound:
        inbound = self._inbound.get(edge)
        if inbound is None:
            raise ConnectorError(f"{edge!r} is no edge to this process")
        return inbound
