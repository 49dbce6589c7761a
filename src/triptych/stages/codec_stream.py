"""One request in the Code2Wav stage: its frames on their way to sound, and the chunk that is next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.connectors.contract import Handoff
from triptych.errors import TriptychError
from triptych.stages.playout_clock import PlayoutClock
from triptych.telemetry.stage_times import StageTimes

Codes = NDArray[np.int32]  # [n, num_quantizers]


class CodecFault(TriptychError):
    """What came for a request, or what came out of it, cannot be audio."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request. Its frames wait in `handoffs` (not released, so the sender sees them) and then in `buffer`."""

    request_id: str
    credit: int
    playout: PlayoutClock
    slot: int | None = None
    handoffs: deque[Handoff] = field(default_factory=deque)
    buffer: deque[Codes] = field(default_factory=deque)
    num_buffered: int = 0
    num_decoded: int = 0
    num_chunks: int = 0
    ended: bool = False  # the final handoff is in the buffer
    ready_at: float | None = None  # since when its next chunk could be decoded
    first_ready_at: float | None = None  # since when its first one could be
    started_at: float | None = None  # when its first one was begun
    first_at: float | None = None  # when that one was decoded

    def times(self, now: float) -> StageTimes:
        """For a message about the request that is sent `now`."""
        return StageTimes.until(now, ready=self.first_ready_at, started=self.started_at, first=self.first_at)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_frames` of a stream, ready to decode. An empty one only says that the audio has ended."""

    stream: Stream
    num_frames: int
    final: bool

    @property
    def kind(self) -> tuple[int, bool]:
        """Chunks of one kind can share a call of the vocoder."""
        return self.num_frames, self.stream.num_decoded == 0
