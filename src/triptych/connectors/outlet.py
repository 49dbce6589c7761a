"""Messages to one other process, which may be away for a while and come back at the same address."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import zmq


class Outlet:
    """A PUSH socket that is connected on first use. Nothing here waits.

    `send` may refuse; `post` may not, so what ZeroMQ does not take then waits here, in order. Only ends and credits are
    posted, a few for each request, which bounds what waits.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, high_water_mark: int) -> None:
        self._context = context
        self._address = address
        self._high_water_mark = high_water_mark
        self._socket: zmq.Socket[bytes] | None = None
        self._posted: deque[bytes] = deque()
        self._full = False

    def send(self, frames: Sequence[bytes]) -> bool:
        """False, and nothing is sent, when the pipe is full."""
        return self._flush() and self._try_send(frames)

    def post(self, frame: bytes) -> None:
        if not self.send([frame]):
            self._posted.append(frame)

    def drained(self) -> bool:
        """Whether something was refused since the last time this was true, and there is room again."""
        if not self._full or self._socket is None or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        self._full = False
        return self._flush()

    def reset(self) -> None:
        """Drop what the other process has not read. The next message goes to whoever has the address then."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
        self._posted.clear()
        self._full = False

    def _flush(self) -> bool:
        while self._posted:
            if not self._try_send([self._posted[0]]):
                return False
            self._posted.popleft()
        return True

    def _try_send(self, frames: Sequence[bytes]) -> bool:
        if self._socket is None:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.SNDHWM, self._high_water_mark)
            self._socket.connect(self._address)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._full = True
            return False
        return True
