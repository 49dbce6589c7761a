"""The target's half of an edge: order, what waits to be read or released, and every way a request can end."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.config.schema import ConnectorExtra
from triptych.connectors.contract import Array, Handoff
from triptych.connectors.edge import Backward
from triptych.errors import ConnectorClosed, ConnectorError, SequenceGap

logger = logging.getLogger(__name__)

CLOSED_LIMIT = 4096  # closed requests that are remembered, for what is still on its way to them
UNOPENED_LIMIT = 1024  # requests that may have sent something before the stage has heard of them
OWED_LIMIT = 64  # releases of all requests together that the sender may not have been told of


@dataclass(slots=True)
class _Incoming:
    """A request at its target. Until it is opened, what arrives waits in `early`, and what went wrong in `fault`."""

    opened: bool
    expected: int = 0
    final: bool = False
    unreleased: set[int] = field(default_factory=set)
    early: list[Handoff] = field(default_factory=list)
    fault: ConnectorError | None = None
    lost: ConnectorError | None = None


class EdgeReceiver:
    """Implements `Receiver`; `accept`, `fail`, `lose`, `withdraw` and `reset` are for the connector.

    Releases are told to the sender in batches: once a request has half its window unreleased or untold, when its final
    handoff is released, or when OWED_LIMIT releases of any requests are untold. So a sender without credit always gets
    every release, and one that waits for a full transport hears from a receiver that empties it.
    """

    def __init__(
        self,
        *,
        edge: str,
        source: str,
        extra: ConnectorExtra,
        backward: Backward,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._edge = edge
        self._source = source
        self._window = extra.window
        self._timeout_s = extra.put_timeout_s
        self._backward = backward
        self._clock = clock
        self._requests: dict[str, _Incoming] = {}
        self._unopened: dict[str, None] = {}  # in order of arrival
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._arrived: list[tuple[str, Handoff | ConnectorError]] = []
        self._owed: dict[str, int] = {}
        self._num_owed = 0
        self._stalled_since: dict[str, float] = {}  # in order of time: a full window, or a loss, of an open request

    def open(self, request_id: str) -> None:
        incoming = self._requests.get(request_id)
        if incoming is None:
            self._requests[request_id] = _Incoming(opened=True)
            return
        if incoming.opened:
            raise ConnectorError(f"{self._edge}: request {request_id!r} was opened twice")
        incoming.opened = True
        del self._unopened[request_id]
        self._arrived.extend((request_id, handoff) for handoff in incoming.early)
        incoming.early.clear()
        if incoming.fault is not None:
            self.fail(request_id, incoming.fault)

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        self._fail_stalled()
        if not self._arrived:
            return []
        arrived, self._arrived = self._arrived, []
        return [item if isinstance(item, Handoff) else (request_id, item) for request_id, item in arrived]

    def release(self, handoff: Handoff) -> None:
        handoff.arrays.clear()
        request_id = handoff.request_id
        incoming = self._requests.get(request_id)
        if incoming is None or handoff.seq not in incoming.unreleased:
            return  # closed meanwhile, or released before
        incoming.unreleased.remove(handoff.seq)
        if incoming.lost is None:
            self._stalled_since.pop(request_id, None)
        self._owed[request_id] = self._owed.get(request_id, 0) + 1
        self._num_owed += 1
        if incoming.final and not incoming.unreleased:
            del self._requests[request_id]
            self._remember_closed(request_id)
            self._pay()
        else:
            self._pay_if_due(request_id, incoming)

    def close(self, request_id: str) -> None:
        if self._forget(request_id):
            self._backward.refuse(request_id)

    def accept(self, request_id: str, seq: int, final: bool, arrays: dict[str, Array]) -> None:
        """A handoff has arrived."""
        incoming = self._requests.get(request_id)
        if incoming is None:
            if request_id in self._closed:
                self._backward.refuse(request_id)
                return
            incoming = self._expect(request_id)
        if incoming.final or seq != incoming.expected:
            self.fail(request_id, self._gap(request_id, incoming, seq))
            return
        if len(incoming.unreleased) + self._owed.get(request_id, 0) >= self._window:
            self.fail(
                request_id,
                ConnectorError(
                    f"{self._edge}: request {request_id!r} has more than window = {self._window} on its way"
                ),
            )
            return
        incoming.expected += 1
        incoming.final = final
        incoming.unreleased.add(seq)
        handoff = Handoff(request_id=request_id, source=self._source, seq=seq, final=final, arrays=arrays)
        if incoming.opened:
            self._arrived.append((request_id, handoff))
        else:
            incoming.early.append(handoff)
        self._pay_if_due(request_id, incoming)
        if len(incoming.unreleased) == self._window:
            self._stalled_since[request_id] = self._clock()

    def fail(self, request_id: str, error: ConnectorError) -> None:
        """Report the error for this request, now or when it is opened, and take nothing more of it."""
        incoming = self._requests.get(request_id)
        if incoming is None:
            if request_id in self._closed:
                return
            incoming = self._expect(request_id)
        if incoming.opened:
            self._forget(request_id)
            self._arrived.append((request_id, error))
        else:
            incoming.fault = incoming.fault or error
            incoming.early.clear()
        self._backward.refuse(request_id)

    def lose(self, request_id: str, error: ConnectorError) -> None:
        """What held the payload of the next handoff is gone.

        A source that withdraws a request frees its payloads, and says so in a message that may still be on its way; of
        one that has died the server tells. Only if neither comes is the error reported, after `put_timeout_s`, or as a
        gap when the next handoff comes.
        """
        if request_id in self._closed:
            return
        incoming = self._requests.get(request_id) or self._expect(request_id)
        if incoming.lost is None:
            incoming.lost = error
            self._stalled_since.setdefault(request_id, self._clock())

    def withdraw(self, request_id: str) -> None:
        """The source has given the request up. Whoever asked it to tells this stage too."""
        if request_id in self._requests:
            self._forget(request_id)

    def reset(self) -> None:
        """The source's process is gone, and every request with it."""
        for request_id in list(self._requests):
            self._forget(request_id)

    def _expect(self, request_id: str) -> _Incoming:
        if len(self._unopened) >= UNOPENED_LIMIT:
            oldest = next(iter(self._unopened))
            logger.warning("%s: request %r sends but was never opened; its handoffs are dropped", self._edge, oldest)
            self.close(oldest)
        self._unopened[request_id] = None
        incoming = self._requests[request_id] = _Incoming(opened=False)
        return incoming

    def _gap(self, request_id: str, incoming: _Incoming, seq: int) -> SequenceGap:
        due = "the end" if incoming.final else f"handoff {incoming.expected}"
        return SequenceGap(f"{self._edge}: request {request_id!r} got handoff {seq} where {due} was due")

    def _fail_stalled(self) -> None:
        while self._stalled_since:
            request_id, since = next(iter(self._stalled_since.items()))
            if self._clock() - since < self._timeout_s:
                return
            del self._stalled_since[request_id]
            limit = f"put_timeout_s = {self._timeout_s:g}"
            stall = ConnectorClosed(f"{self._edge}: nothing of request {request_id!r} was taken for {limit}")
            self.fail(request_id, self._requests[request_id].lost or stall)

    def _pay_if_due(self, request_id: str, incoming: _Incoming) -> None:
        owed = self._owed.get(request_id, 0)
        half_used = owed and 2 * (len(incoming.unreleased) + owed) >= self._window
        if half_used or self._num_owed >= OWED_LIMIT:
            self._pay()

    def _pay(self) -> None:
        owed, self._owed, self._num_owed = self._owed, {}, 0
        self._backward.credit(owed)

    def _forget(self, request_id: str) -> bool:
        """Drop everything of the request and remember it as closed. False when it was not known, or closed before."""
        self._arrived = [item for item in self._arrived if item[0] != request_id]
        self._remember_closed(request_id)
        if self._requests.pop(request_id, None) is None:
            return False
        self._unopened.pop(request_id, None)
        self._stalled_since.pop(request_id, None)
        self._num_owed -= self._owed.pop(request_id, 0)
        return True

    def _remember_closed(self, request_id: str) -> None:
        self._closed[request_id] = None
        self._closed.move_to_end(request_id)
        if len(self._closed) > CLOSED_LIMIT:
            self._closed.popitem(last=False)
