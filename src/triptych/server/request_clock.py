"""The times of one request, as its client sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from triptych.errors import CapacityError, RequestError
from triptych.pipeline.request import AudioDelta, Done, Event, TextDelta
from triptych.server.metrics import Metrics
from triptych.server.sse import ClientGone

if TYPE_CHECKING:
    from triptych.server.request_trace import RequestTrace


class RequestClock:
    """Times one request. `saw` takes its events as they are sent on; after a Done, or a first `end`, nothing counts.

    Its `trace`, if it has one, ends with it.
    """

    def __init__(
        self, metrics: Metrics, trace: RequestTrace | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.trace = trace
        self._metrics = metrics
        self._now = now
        self._arrival = now()
        self._ended = False
        self._first_text: float | None = None
        self._first_audio: float | None = None
        self._last_audio = 0.0
        self._audio_seconds = 0.0
        self._underrun = 0.0

    def saw(self, event: Event) -> None:
        now = self._now()
        match event:
            case TextDelta() if event.text and self._first_text is None:
                self._first_text = now
                self._metrics.ttft.observe(now - self._arrival)
            case AudioDelta() if event.samples:
                self._saw_audio(now, len(event.samples) / 4 / self._metrics.sample_rate)
            case Done():
                self._finish(now, event)

    def end(self, error: BaseException | None) -> None:
        """The request is over without a Done: `error` says why; None when it was left by its client."""
        if self._ended:
            return
        match error:
            case None | ClientGone() | asyncio.CancelledError():
                self._end("disconnected", None)
            case RequestError():
                self._end("refused", error)
            case CapacityError():
                self._end("overloaded", error)
            case _:
                self._end("failed", error)

    def _end(self, outcome: str, result: Done | BaseException | None) -> None:
        self._ended = True
        self._metrics.count(outcome)
        if self.trace is not None:
            self.trace.end(outcome, self._measures(), result)

    def _measures(self) -> dict[str, float]:
        """What there is to say so far of the times of this request, under the names of `/metrics`."""
        measures = {}
        if self._first_text is not None:
            measures["time_to_first_token_s"] = self._first_text - self._arrival
        if self._first_audio is not None:
            measures |= {
                "audio_ttfp_s": self._first_audio - self._arrival,
                "audio_duration_s": self._audio_seconds,
                "audio_rtf": (self._last_audio - self._arrival) / self._audio_seconds,
                "audio_underrun_s": self._underrun,
            }
        return measures

    def _saw_audio(self, now: float, seconds: float) -> None:
        if self._first_audio is None:
            self._first_audio = now
            self._metrics.ttfp.observe(now - self._arrival)
        runs_out = self._first_audio + self._audio_seconds + self._underrun
        self._underrun += max(0.0, now - runs_out)
        self._audio_seconds += seconds
        self._last_audio = now

    def _finish(self, now: float, done: Done) -> None:
        self._end(done.finish_reason, done)
        self._metrics.prompt_tokens.inc(done.prompt_tokens)
        self._metrics.count_media(done.media_tokens)
        self._metrics.generation_tokens.inc(done.text_tokens)
        self._metrics.audio_frames.inc(done.audio_frames)
        self._metrics.latency.observe(now - self._arrival)
        if self._audio_seconds > 0:
            self._metrics.duration.observe(self._audio_seconds)
            self._metrics.underrun.observe(self._underrun)
            self._metrics.rtf.observe((self._last_audio - self._arrival) / self._audio_seconds)
