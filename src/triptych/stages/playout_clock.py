"""When the listener of one stream runs out of audio, as the stages that make it can tell. Numbers only: no tensors, no
I/O, and the time is always given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.stages.cadence import Cadence

FRAME_S = 0.08  # what one codec frame plays
TRIM_S = 555 / 24000  # what the start of a stream is short of its frames
HEADROOM_S = 0.02  # for steps that take longer than those before
START_WAIT_S = 1.0  # how long a stage may hold back a stream that has not started, for those that have


@dataclass(slots=True)
class PlayoutClock:
    """A listener starts at the first chunk and plays in real time; after a silence, from where it stopped.

    Frames are audible in whole chunks: those of a chunk that lacks some are of no use yet. A stream that has not
    started has no audio that could run out, but it should by `start_by`, where its stage knows one. All times are on
    one monotonic clock.
    """

    cadence: Cadence
    start_by: float = math.inf
    num_frames: int = 0  # handed out
    num_audible: int = 0  # of those, the ones in whole chunks
    runs_out_at: float | None = None  # None: not started

    def hand_out(self, num_frames: int, now: float) -> None:
        """The next `num_frames` are on their way to the listener."""
        self.num_frames += num_frames
        while self.num_frames >= (end := self._chunk_end):
            begins = now - TRIM_S if self.runs_out_at is None else max(self.runs_out_at, now)
            self.runs_out_at = begins + (end - self.num_audible) * FRAME_S
            self.num_audible = end

    @property
    def chunk_due_at(self) -> float:
        """When the next chunk is due: as the one before ends, or by `start_by`."""
        return self.start_by if self.runs_out_at is None else self.runs_out_at

    def frame_due_at(self, now: float, step_s: float) -> float:
        """When a step that makes the next frame has to begin, if frames take `step_s` each from then on.

        -inf for a stream that should have started by now: it has waited as long as it may.
        """
        if self.runs_out_at is None:
            return self.start_by if now < self.start_by else -math.inf
        return self.runs_out_at - (self._chunk_end - self.num_frames) * step_s - HEADROOM_S

    @property
    def _chunk_end(self) -> int:
        return self.num_audible + self.cadence.size(self.num_audible)
