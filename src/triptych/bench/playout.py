"""What a listener hears of audio that arrives in pieces: playback starts with the first piece and runs in real time."""

from __future__ import annotations

from dataclasses import dataclass

INAUDIBLE_S = 0.01  # a player's own buffer covers less than this


@dataclass(slots=True)
class Playout:
    """Times are seconds on any one clock. A piece that comes after what came before was played leaves a silence, and
    all that follows is played that much later. So `silent_s` is how late the latest piece was."""

    first_at: float | None = None
    last_at: float = 0.0
    audio_s: float = 0.0
    silent_s: float = 0.0
    longest_gap_s: float = 0.0
    runs_out_at: float = 0.0

    def arrive(self, at: float, seconds: float) -> None:
        """`seconds` of audio arrive at the time `at`, no earlier than the piece before. Empty pieces do not count."""
        if seconds <= 0:
            return
        if self.first_at is None:
            self.first_at = self.runs_out_at = at
        gap = max(0.0, at - self.runs_out_at)
        self.silent_s += gap
        self.longest_gap_s = max(self.longest_gap_s, gap)
        self.runs_out_at = max(self.runs_out_at, at) + seconds
        self.audio_s += seconds
        self.last_at = at

    @property
    def flows(self) -> bool:
        """Whether there was audio and a listener heard it without a break."""
        return self.first_at is not None and self.silent_s <= INAUDIBLE_S
