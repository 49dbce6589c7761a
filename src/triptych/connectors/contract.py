"""The contract between two stages: what every connector does, whatever carries the bytes.

An edge joins one source stage to one target stage. Per request and edge:

- handoffs carry `seq` 0, 1, 2, ... and the last one has `final=True`; the receiving side raises `SequenceGap` for that
  request when one is missing or doubled (an error, never silence);
- at most `window` handoffs are unconsumed at any time. `try_put` never waits: it returns False when the window is
  full (or the transport would block), and the caller parks that one request and tries again when `writable()` names it;
- `close` frees whatever either side holds for the request (credit, unread shared memory), is idempotent, and is called
  on finish, abort and failure. A handoff for a closed or unknown request is dropped and its memory released;
- arrays are numpy arrays (any dtype msgspec can name, C-contiguous); the receiver gets equal arrays that stay valid
  until `release`.
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
    """What one `try_put` gave, as the target stage sees it."""

    request_id: str
    source: str
    seq: int
    final: bool
    arrays: dict[str, np.ndarray[Any, Any]]


class Sender(Protocol):
    """The source stage's half of an edge."""

    def open(self, request_id: str) -> None:
        """Start a request: full credit, seq 0."""

    def try_put(self, request_id: str, arrays: Arrays, *, final: bool = False) -> bool:
        """Send the next handoff, or return False (nothing sent) when the request has no credit."""

    def writable(self) -> list[str]:
        """Requests that were refused by `try_put` and have got credit since; each is named once."""

    def close(self, request_id: str) -> None: ...


class Receiver(Protocol):
    """The target stage's half of an edge."""

    def open(self, request_id: str) -> None:
        """Expect this request. Handoffs that arrived before `open` are kept (bounded by the sender's window)."""

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        """Everything that has arrived, in order, without waiting. A tuple is (request id, SequenceGap)."""

    def release(self, handoff: Handoff) -> None:
        """The stage has consumed this handoff: its memory is freed and its credit goes back to the sender."""

    def close(self, request_id: str) -> None: ...
