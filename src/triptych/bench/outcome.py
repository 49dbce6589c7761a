"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from triptych.bench.audio import AudioReader
from triptych.bench.playout import Playout


@dataclass(slots=True)
class Outcome:
    """Times are seconds on the clock of `started_at`. `failure` is a short reason that many requests may share, and
    `detail` what was said about this one."""

    started_at: float
    ended_at: float = 0.0
    send_delay_s: float = 0.0  # sent later than it was due, because all places were taken or this client was busy
    failure: str | None = None
    detail: str = ""
    text_times: list[float] = field(default_factory=list)  # of each event with text
    text: list[str] = field(default_factory=list)
    playout: Playout = field(default_factory=Playout)
    audio: AudioReader = field(default_factory=AudioReader)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    fingerprint: str | None = None  # the server's `system_fingerprint`

    @property
    def has_audio(self) -> bool:
        return self.playout.first_at is not None

    @property
    def ttft_s(self) -> float | None:
        return self.text_times[0] - self.started_at if self.text_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each text token after the first; None where there is no second one."""
        if self.text_tokens < 2 or not self.text_times:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.text_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events with text."""
        return [later - earlier for earlier, later in pairwise(self.text_times)]

    @property
    def e2el_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def ttfp_s(self) -> float | None:
        return None if self.playout.first_at is None else self.playout.first_at - self.started_at

    @property
    def audio_after_text_s(self) -> float | None:
        """From the first text to the first audio: what speech takes, whatever the prompt took before."""
        ttft, ttfp = self.ttft_s, self.ttfp_s
        return None if ttft is None or ttfp is None else ttfp - ttft

    @property
    def rtf(self) -> float | None:
        return (self.playout.last_at - self.started_at) / self.playout.audio_s if self.has_audio else None

    @property
    def prompt_tokens(self) -> int:
        return _count(self.usage, "prompt_tokens") or 0

    @property
    def text_tokens(self) -> int:
        """By the server's usage: codec frames, where it counts them as tokens too, are left out. Without usage, the
        events that held text."""
        total = _count(self.usage, "completion_tokens")
        if total is None:
            return len(self.text_times)
        details = self.usage.get("completion_tokens_details")
        details = details if isinstance(details, dict) else {}
        text, audio = _count(details, "text_tokens"), _count(details, "audio_tokens")
        return text if text is not None else total - (audio or 0)

    @property
    def counted_by_server(self) -> bool:
        return _count(self.usage, "completion_tokens") is not None

    def record(self) -> dict[str, Any]:
        """One line of a detailed result."""
        return {
            "failure": self.failure,
            "detail": self.detail,
            "send_delay_s": self.send_delay_s,
            "ttft_s": self.ttft_s,
            "itl_s": self.itl_s,
            "e2el_s": self.e2el_s,
            "audio_ttfp_s": self.ttfp_s,
            "audio_rtf": self.rtf,
            "audio_duration_s": self.playout.audio_s,
            "audio_underrun_s": self.playout.silent_s if self.has_audio else None,
            "audio_rms": self.audio.rms if self.has_audio else None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.text_tokens,
            "finish_reason": self.finish_reason,
            "text": "".join(self.text),
        }


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
