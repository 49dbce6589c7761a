"""The server's end of the control connection: one ROUTER that every stage process connects to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from triptych.connectors.wire import ToStage, encode
from triptych.errors import ConnectorClosed

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 4096  # messages, each way and for each process
BATCH = 256  # messages taken in one turn of the event loop, which other work shares

Receive = Callable[[bytes, list[bytes]], None]


class ControlSocket:
    """Sends never wait and messages are delivered from the event loop, so both sides stay synchronous code.

    `receive(identity, frames)` is called for every message, in order for each process.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of a message that goes nowhere
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.fileno()

    def bind(self, endpoint: str) -> None:
        self._socket.bind(endpoint)
        self._loop.add_reader(self._fd, self.drain)

    def send(self, identity: bytes, message: ToStage) -> bool:
        """False when the process has not read for HIGH_WATER_MARK messages. Raises ConnectorClosed when it is gone."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectorClosed(f"{identity!r}: {error}") from error
        finally:
            self._loop.call_soon(self.drain)  # a send may use up the edge that announces a message
        return True

    def drain(self) -> bool:
        """Deliver what has come, up to a batch. True when there may be more, which is then due in the next turn."""
        for _ in range(BATCH):
            if self._socket.closed:
                return False
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._receive(identity, frames)
            except Exception:
                logger.exception("a message from %r could not be handled", identity)
        self._loop.call_soon(self.drain)
        return True

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)
