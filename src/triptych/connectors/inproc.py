"""An edge within one process: arrays pass by reference."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.config.schema import ConnectorExtra
from triptych.connectors.contract import Arrays
from triptych.connectors.message import lay_out
from triptych.connectors.receiver import EdgeReceiver
from triptych.connectors.sender import EdgeSender


class InprocLink:
    """`Forward` and `Backward` as plain calls from one half to the other."""

    sender: EdgeSender
    receiver: EdgeReceiver

    def put(self, request_id: str, seq: int, final: bool, arrays: Arrays) -> str | None:
        lay_out(arrays)  # raises what it would raise between processes
        contiguous = {name: array if array.flags.c_contiguous else array.copy() for name, array in arrays.items()}
        self.receiver.accept(request_id, seq, final, contiguous)
        return ""

    def withdraw(self, request_id: str) -> None:
        self.receiver.withdraw(request_id)

    def discard(self, name: str) -> None:
        """No payload is ever held: the receiver has it at once."""

    def credit(self, counts: Mapping[str, int]) -> None:
        self.sender.credit(counts)

    def refuse(self, request_id: str) -> None:
        self.sender.refuse(request_id)


def connect(edge: str, source: str, extra: ConnectorExtra) -> tuple[EdgeSender, EdgeReceiver]:
    link = InprocLink()
    link.sender = EdgeSender(edge=edge, extra=extra, forward=link)
    link.receiver = EdgeReceiver(edge=edge, source=source, extra=extra, backward=link)
    return link.sender, link.receiver
