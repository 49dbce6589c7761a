"""An edge between processes of one machine: messages through ZeroMQ, large payloads through shared memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from triptych.connectors import segments
from triptych.connectors.contract import Array, Arrays
from triptych.connectors.message import ArrayHeader, Credit, Put, Refuse, Withdraw, encode, join, lay_out, pieces, view
from triptych.connectors.outlet import Outlet
from triptych.connectors.segments import SegmentWriter
from triptych.errors import ConnectorClosed, ConnectorError

logger = logging.getLogger(__name__)


class ShmForward:
    """`Forward` of one edge. A payload larger than `inline_bytes` goes into a segment, and its name travels."""

    def __init__(self, *, edge: str, outlet: Outlet, writer: SegmentWriter, inline_bytes: int) -> None:
        self._edge = edge
        self._outlet = outlet
        self._writer = writer
        self._inline_bytes = inline_bytes
        self._warned = False

    def put(self, request_id: str, seq: int, final: bool, arrays: Arrays) -> str | None:
        headers, size = lay_out(arrays)
        segment = self._write(headers, arrays, size) if size > self._inline_bytes else ""
        frames = [encode(Put(self._edge, request_id, seq, final, headers, segment))]
        if not segment:
            frames.append(join(headers, arrays))
        if self._outlet.send(frames):
            return segment
        if segment:
            segments.unlink(segment)
        return None

    def withdraw(self, request_id: str) -> None:
        self._outlet.post(encode(Withdraw(self._edge, request_id)))

    def discard(self, name: str) -> None:
        segments.unlink(name)

    def _write(self, headers: tuple[ArrayHeader, ...], arrays: Arrays, size: int) -> str:
        """The segment's name, or "" when there is no room for one: the payload then travels in the message."""
        try:
            return self._writer.write(pieces(headers, arrays))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s: no shared memory for %d bytes (%s); large payloads take the slower way through a socket. "
                    "Make %s larger (docker: --shm-size)",
                    self._edge,
                    size,
                    error,
                    segments.DIRECTORY,
                )
            return ""


class ShmBackward:
    """`Backward` of one edge."""

    def __init__(self, *, edge: str, outlet: Outlet) -> None:
        self._edge = edge
        self._outlet = outlet

    def credit(self, counts: Mapping[str, int]) -> None:
        self._outlet.post(encode(Credit(self._edge, dict(counts))))

    def refuse(self, request_id: str) -> None:
        self._outlet.post(encode(Refuse(self._edge, request_id)))


def unpack(put: Put, frames: Sequence[bytes], *, token: str, source_process: str) -> dict[str, Array]:
    """The arrays of a handoff, over memory that is this process's own.

    `frames` are those after the header. Raises ConnectorClosed when the segment is gone, and ConnectorError on a
    message that contradicts itself.
    """
    if not put.segment:
        if len(frames) != 1:
            raise ConnectorError(f"a handoff came with {len(frames)} payloads, not one")
        return view(put.arrays, bytearray(frames[0]))
    if frames or not segments.is_segment(put.segment, token, source_process):
        raise ConnectorError(f"{put.segment!r} is no shared memory of process {source_process!r}, or not all there is")
    try:
        return view(put.arrays, segments.take(put.segment))
    except FileNotFoundError as error:
        raise ConnectorClosed(f"its shared memory {put.segment} is gone, and so is its source") from error
    except (OSError, ValueError) as error:
        raise ConnectorError(f"its shared memory {put.segment} cannot be mapped: {error}") from error
