"""Messages from a stage process to the server. ZeroMQ's I/O thread delivers them; nothing here waits."""

from __future__ import annotations

from collections import deque

import zmq

from triptych.connectors.wire import ToServer, encode
from triptych.errors import ConnectorClosed

SEND_HIGH_WATER_MARK = 4096  # messages that ZeroMQ takes while the server does not read
PENDING_LIMIT = 65536  # what one turn of the loop may emit beyond that


class Outbox:
    """Non-blocking sends on the control socket.

    When the server does not read, ZeroMQ's queue fills up; what comes then waits here, in order, and `flush` returns
    False until it is gone. The loop does not step in that time, so what waits here is what one turn of it emits.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._pending: deque[list[bytes]] = deque()

    def send(self, message: ToServer, samples: bytes | None = None) -> None:
        """Raises ConnectorClosed when more is waiting than any turn of a healthy loop emits."""
        frames = [encode(message)] if samples is None else [encode(message), samples]
        if self._pending or not self._try_send(frames):
            if len(self._pending) >= PENDING_LIMIT:
                raise ConnectorClosed(f"the server has not read for {PENDING_LIMIT} messages")
            self._pending.append(frames)

    def flush(self) -> bool:
        """Send what waits, as far as it goes. True when nothing waits any more."""
        while self._pending:
            if not self._try_send(self._pending[0]):
                return False
            self._pending.popleft()
        return True

    def _try_send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
