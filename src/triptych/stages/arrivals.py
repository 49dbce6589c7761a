"""A stage's incoming handoffs, from every replica of the stage before."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.connectors.contract import Handoff, Receiver


class Arrivals:
    """Takes handoffs over one edge for each source, by its name. All of a request come over one of them: that from the
    replica it was opened for."""

    def __init__(self, receivers: Mapping[str, Receiver]) -> None:
        self._receivers = receivers

    def open(self, request_id: str, source: str) -> None:
        """Expect this request from the replica of that name."""
        self._receivers[source].open(request_id)

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        """Everything that has arrived, in order for each request, without waiting; see `Receiver.receive`."""
        return [item for receiver in self._receivers.values() for item in receiver.receive()]

    def release(self, handoff: Handoff) -> None:
        """The stage has consumed this handoff. Idempotent, and allowed after `close`."""
        self._receivers[handoff.source].release(handoff)

    def close(self, request_id: str) -> None:
        """Take nothing more of this request, opened or not: what is on its way may come from any source."""
        for receiver in self._receivers.values():
            receiver.close(request_id)
