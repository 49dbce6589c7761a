"""A stage's outgoing pieces, per request: sent as credit allows, kept in order while there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from triptych.connectors.contract import Array, Arrays, Sender
from triptych.telemetry.stage_counts import TransferCounts


@dataclass(slots=True)
class _Pending:
    sender: Sender
    pieces: deque[tuple[Arrays, bool]] = field(default_factory=deque)
    whole: dict[str, list[Array]] = field(default_factory=dict)  # without async chunks: everything so far, by name


class Handoffs:
    """Sends named arrays to the next stage, all of a request over one edge: that to the replica it was opened for.

    With `async_chunk` every piece goes out at once; without, all pieces of a request go as one when it is complete,
    those of one name joined along their first axis. A request whose pieces wait for credit is `blocked`, and its stage
    parks it: so what waits here is what one step gave.
    """

    def __init__(self, senders: Mapping[str, Sender], *, async_chunk: bool) -> None:
        self._senders, self._async_chunk = senders, async_chunk
        self.transfers = TransferCounts()
        self._pending: dict[str, _Pending] = {}

    def open(self, request_id: str, target: str) -> None:
        """Start a request whose pieces go to the replica of that name."""
        sender = self._senders[target]
        self._pending[request_id] = _Pending(sender)
        sender.open(request_id)

    def push(self, request_id: str, piece: Arrays, *, final: bool = False) -> bool:
        """Hand over `piece`, in order. False when it has to wait: park the request until `flush` names it."""
        pending = self._pending[request_id]
        if not self._async_chunk:
            for name, array in piece.items():
                pending.whole.setdefault(name, []).append(array)
            if not final:
                return True
            piece = {name: np.concatenate(arrays) for name, arrays in pending.whole.items()}
        pending.pieces.append((piece, final))
        return self._send(request_id, pending)

    def flush(self) -> list[str]:
        """Send what has got credit since. Returns the requests of which nothing waits any more."""
        unblocked = []
        for sender in self._senders.values():
            for request_id in sender.writable():
                pending = self._pending.get(request_id)
                if pending is not None and self._send(request_id, pending):
                    unblocked.append(request_id)
        return unblocked

    def close(self, request_id: str) -> None:
        """Drop the request: what waits is not sent, what is unread is freed. Idempotent."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.sender.close(request_id)

    def _send(self, request_id: str, pending: _Pending) -> bool:
        while pending.pieces:
            piece, final = pending.pieces[0]
            started = time.perf_counter()
            if not pending.sender.try_put(request_id, piece, final=final):
                return False
            self.transfers.tx_s.observe(time.perf_counter() - started)
            self.transfers.size_bytes.observe(sum(array.nbytes for array in piece.values()))
            pending.pieces.popleft()
            if final:
                # The edge itself ends when the other side has consumed everything.
                del self._pending[request_id]
        return True
