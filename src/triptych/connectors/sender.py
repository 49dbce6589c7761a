"""The source's half of an edge: numbers, credit, and what is unread."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.config.schema import ConnectorExtra
from triptych.connectors.contract import Arrays
from triptych.connectors.edge import Forward
from triptych.errors import ConnectorError


@dataclass(slots=True)
class _Outgoing:
    """A request at its source. `unread` holds one entry for each handoff without credit back, oldest first."""

    seq: int = 0
    final: bool = False
    refused: bool = False
    unread: deque[str] = field(default_factory=deque)


class EdgeSender:
    """Implements `Sender`; `credit`, `refuse`, `retry` and `reset` are for the connector."""

    def __init__(self, *, edge: str, extra: ConnectorExtra, forward: Forward) -> None:
        self._edge = edge
        self._window = extra.window
        self._forward = forward
        self._requests: dict[str, _Outgoing] = {}
        self._blocked: set[str] = set()  # refused although they had credit: the transport was full
        self._writable: dict[str, None] = {}

    def open(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ConnectorError(f"{self._edge}: request {request_id!r} was opened twice")
        self._requests[request_id] = _Outgoing()

    def try_put(self, request_id: str, arrays: Arrays, *, final: bool = False) -> bool:
        outgoing = self._requests.get(request_id)
        if outgoing is None:
            return True  # nobody takes it any more, which is no reason for the source to wait
        if outgoing.final:
            raise ConnectorError(f"{self._edge}: request {request_id!r} goes on after its final handoff")
        self._writable.pop(request_id, None)
        if len(outgoing.unread) >= self._window:
            outgoing.refused = True
            return False
        holder = self._forward.put(request_id, outgoing.seq, final, arrays)
        if holder is None:
            self._blocked.add(request_id)
            return False
        self._blocked.discard(request_id)
        outgoing.unread.append(holder)
        outgoing.seq += 1
        outgoing.final = final
        return True

    def writable(self) -> list[str]:
        writable, self._writable = self._writable, {}
        return list(writable)

    def close(self, request_id: str) -> None:
        self._writable.pop(request_id, None)
        outgoing = self._requests.get(request_id)
        if outgoing is None or outgoing.final:
            return  # after the final handoff the rest is up to the target
        self._forget(request_id)
        if outgoing.seq:
            self._forward.withdraw(request_id)

    def credit(self, counts: Mapping[str, int]) -> None:
        """The target has released so many handoffs of each request, so it has whatever held their payloads."""
        for request_id, count in counts.items():
            outgoing = self._requests.get(request_id)
            if outgoing is None:
                continue
            for _ in range(min(count, len(outgoing.unread))):
                outgoing.unread.popleft()
            if outgoing.final and not outgoing.unread:
                del self._requests[request_id]
            elif outgoing.refused and len(outgoing.unread) < self._window:
                outgoing.refused = False
                self._writable[request_id] = None

    def refuse(self, request_id: str) -> None:
        """The target is done with the request: what is put from now on is dropped, and so nothing need wait."""
        outgoing = self._requests.get(request_id)
        if outgoing is None:
            return
        waits = outgoing.refused or request_id in self._blocked or request_id in self._writable
        self._forget(request_id)
        if waits:
            self._writable[request_id] = None

    def retry(self) -> None:
        """The transport has room again."""
        self._writable.update(dict.fromkeys(self._blocked))
        self._blocked.clear()

    def reset(self) -> None:
        """The target's process is gone, and every request with it."""
        for request_id in list(self._requests):
            self.refuse(request_id)

    def _forget(self, request_id: str) -> None:
        for name in self._requests.pop(request_id).unread:
            if name:
                self._forward.discard(name)
        self._blocked.discard(request_id)
        self._writable.pop(request_id, None)
