"""The contract between two stages: what every connector does, whatever carries the bytes.

An edge joins one source to one target, each a replica of a stage. Per request and edge:

- handoffs carry `seq` 0, 1, 2, ... and the last one has `final=True`; the receiving side reports `SequenceGap` for that
  request when one is missing or doubled (an error, never silence) and closes it;
- at most `window` handoffs are unconsumed at any time. `try_put` never waits: it returns False when the window is
  full (or the transport would block), and the caller parks that one request and tries again when `writable()` names it;
- an edge ends by itself when the final handoff has been released. `close` ends it at any other time: it frees whatever
  either side holds for the request (credit, unread shared memory), is idempotent, and is called on abort and failure.
  At the source it changes nothing after the final handoff: what is on its way still arrives. A handoff for a closed
  request is dropped and its memory released, and the source then puts into the void: `try_put` returns True;
- ids of requests never repeat;
- arrays are numpy arrays of booleans, integers, floats or complex numbers. The source must not write into one it has
  put; the receiver gets equal, C-contiguous arrays that stay valid until `release`, and does not write into them either
  (within a process they are the same arrays).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What one `try_put` gave, as the target stage sees it. `source` is the name of the edge's source."""

    request_id: str
    source: str
    seq: int
    final: bool
    arrays: dict[str, np.ndarray[Any, Any]]


class Sender(Protocol):
    """The source stage's half of an edge."""

    def open(self, request_id: str) -> None:
        """Start a request: full credit, seq 0. Raises ConnectorError when it is open already."""

    def try_put(self, request_id: str, arrays: Arrays, *, final: bool = False) -> bool:
        """Send the next handoff, or return False (nothing sent) when the request has no credit.

        Raises ConnectorError on an array that cannot travel, and after the final handoff.
        """

    def writable(self) -> list[str]:
        """Requests that were refused by `try_put` and have got credit since, or need none any more; each named once."""

    def close(self, request_id: str) -> None: ...


class Receiver(Protocol):
    """The target stage's half of an edge."""

    def open(self, request_id: str) -> None:
        """Expect this request. Handoffs that arrived before `open` are kept (bounded by the sender's window)."""

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        """Everything that has arrived, in order, without waiting.

        A tuple is (request id, ConnectorError) and the last of its request: a SequenceGap, or a handoff that cannot be
        read, or a full window of which this stage has released nothing for `put_timeout_s`. Call it about every second.
        """

    def release(self, handoff: Handoff) -> None:
        """The stage has consumed this handoff: its arrays are gone from it, and its credit goes back to the sender.

        Idempotent, and allowed after `close`.
        """

    def close(self, request_id: str) -> None: ...
