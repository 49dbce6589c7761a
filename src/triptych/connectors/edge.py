"""How the two halves of an edge speak to each other, whatever carries the bytes.

    source stage -> EdgeSender --put, withdraw--> EdgeReceiver -> target stage
                        ^------credit, refuse---------'

A request comes to its end on both sides when its final handoff has been released; `refuse` and `withdraw` are for every
other end. What one half says of a request that the other does not know (any more) is ignored, or answered with
`refuse`, so the two may end in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from triptych.connectors.contract import Arrays


class Forward(Protocol):
    """From sender to receiver."""

    def put(self, request_id: str, seq: int, final: bool, arrays: Arrays) -> str | None:
        """Send a handoff without waiting. Returns the name of what holds its payload until the receiver has it ("" if
        nothing does), or None when there is no room now: nothing is sent then."""

    def withdraw(self, request_id: str) -> None: ...

    def discard(self, name: str) -> None:
        """Free what `put` returned, if the receiver has not."""


class Backward(Protocol):
    """From receiver to sender. Nothing sent here is ever lost while both processes live."""

    def credit(self, counts: Mapping[str, int]) -> None: ...

    def refuse(self, request_id: str) -> None: ...
