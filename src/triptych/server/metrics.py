"""What `/metrics` says, in Prometheus' format. Times are seconds, measured in this process, from the request's arrival.

Requests without audio never enter an audio histogram. A name means what the benchmark client means by it:

- `audio_ttfp_s`: arrival to first audio packet;
- `audio_rtf`: (last audio packet - arrival) / seconds of audio;
- `audio_underrun_s`: how long a listener who starts at the first packet and plays in real time hears nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.errors import CapacityError, RequestError
from triptych.media.contract import MediaStats
from triptych.pipeline.health import PipelineHealth
from triptych.pipeline.request import AudioDelta, Done, Event, MediaTokens, TextDelta
from triptych.server.sse import ClientGone

PREFIX = "triptych:"
SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
)
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
OUTCOMES = ("stop", "length", "refused", "overloaded", "failed", "disconnected")


class Metrics:
    """Counters and histograms of one server, in a registry of its own. `health` and `media` are read at a scrape."""

    def __init__(
        self, model_name: str, sample_rate: int, health: Callable[[], PipelineHealth], media: MediaStats
    ) -> None:
        self.registry = CollectorRegistry()
        self.sample_rate = sample_rate
        self._labels = {"model_name": model_name}
        self._requests = Counter(
            f"{PREFIX}requests", "Requests that ended, by outcome.", ["model_name", "outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome=outcome, **self._labels)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._media_tokens = Counter(
            f"{PREFIX}media_tokens",
            "Of the prompt tokens, those that stand for media, by kind.",
            ["model_name", "kind"],
            registry=self.registry,
        )
        self.generation_tokens = self._counter("generation_tokens", "Text tokens of finished requests.")
        self.audio_frames = self._counter("audio_frames", "Codec frames (80 ms of audio) of finished requests.")
        self.ttft = self._histogram("time_to_first_token_s", "Arrival to first text.")
        self.ttfp = self._histogram("audio_ttfp_s", "Arrival to first audio packet.")
        self.latency = self._histogram("e2e_request_latency_s", "Arrival to the end of a finished request.")
        self.duration = self._histogram("audio_duration_s", "Seconds of audio in a reply.")
        self.underrun = self._histogram("audio_underrun_s", "Silence in real-time playout because a packet was late.")
        self.rtf = self._histogram("audio_rtf", "Time until the last audio packet / seconds of audio.", RATIOS)
        self.registry.register(_PipelineCollector(model_name, health))
        self.registry.register(_MediaCollector(model_name, media))

    def count(self, outcome: str) -> None:
        self._requests.labels(outcome=outcome, **self._labels).inc()

    def count_media(self, tokens: MediaTokens) -> None:
        for kind, number in (("audio", tokens.audio), ("image", tokens.image), ("video", tokens.video)):
            if number:
                self._media_tokens.labels(kind=kind, **self._labels).inc(number)

    def scrape(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ["model_name"], registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)


class RequestClock:
    """Times one request. `saw` takes its events as they are sent on; after a Done, or a first `end`, nothing counts."""

    def __init__(self, metrics: Metrics, now: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._now = now
        self._arrival = now()
        self._ended = False
        self._has_text = False
        self._first_audio: float | None = None
        self._last_audio = 0.0
        self._audio_seconds = 0.0
        self._underrun = 0.0

    def saw(self, event: Event) -> None:
        now = self._now()
        match event:
            case TextDelta() if event.text and not self._has_text:
                self._has_text = True
                self._metrics.ttft.observe(now - self._arrival)
            case AudioDelta() if event.samples:
                self._saw_audio(now, len(event.samples) / 4 / self._metrics.sample_rate)
            case Done():
                self._finish(now, event)

    def end(self, error: BaseException | None) -> None:
        """The request is over without a Done: `error` says why; None when it was left by its client."""
        if self._ended:
            return
        self._ended = True
        match error:
            case None | ClientGone() | asyncio.CancelledError():
                self._metrics.count("disconnected")
            case RequestError():
                self._metrics.count("refused")
            case CapacityError():
                self._metrics.count("overloaded")
            case _:
                self._metrics.count("failed")

    def _saw_audio(self, now: float, seconds: float) -> None:
        if self._first_audio is None:
            self._first_audio = now
            self._metrics.ttfp.observe(now - self._arrival)
        runs_out = self._first_audio + self._audio_seconds + self._underrun
        self._underrun += max(0.0, now - runs_out)
        self._audio_seconds += seconds
        self._last_audio = now

    def _finish(self, now: float, done: Done) -> None:
        self._ended = True
        self._metrics.count(done.finish_reason)
        self._metrics.prompt_tokens.inc(done.prompt_tokens)
        self._metrics.count_media(done.media_tokens)
        self._metrics.generation_tokens.inc(done.text_tokens)
        self._metrics.audio_frames.inc(done.audio_frames)
        self._metrics.latency.observe(now - self._arrival)
        if self._audio_seconds > 0:
            self._metrics.duration.observe(self._audio_seconds)
            self._metrics.underrun.observe(self._underrun)
            self._metrics.rtf.observe((self._last_audio - self._arrival) / self._audio_seconds)


class _PipelineCollector(Collector):
    """Gauges and counters of the stages, read when they are asked for."""

    def __init__(self, model_name: str, health: Callable[[], PipelineHealth]) -> None:
        self._model_name = model_name
        self._health = health

    def describe(self) -> Iterator[Metric]:
        return iter(())  # so that registering asks nothing of a pipeline that may not run yet

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        for name, text, value in (
            ("num_requests_running", "Requests in the pipeline.", health.running),
            ("num_requests_waiting", "Requests in the pipeline beyond max_num_seqs.", health.queued),
            ("num_requests_freeing", "Left requests that a stage still holds.", health.freeing),
            ("ready", "Whether every stage takes requests.", int(health.ready)),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for field, text in (
            ("running", "Requests that a stage is working on."),
            ("waiting", "Requests that wait for room in a stage."),
            ("parked", "Requests that wait for the stage after theirs."),
            ("kv_blocks_used", "KV blocks in use."),
            ("kv_blocks_total", "KV blocks of a stage."),
        ):
            gauge = GaugeMetricFamily(
                f"{PREFIX}stage_{field.removesuffix('_total')}", text, labels=["model_name", "stage"]
            )
            for stage, stats in health.stages.items():
                gauge.add_metric([self._model_name, stage], getattr(stats, field))
            yield gauge
        for field, text in (
            ("steps", "Steps of a stage."),
            ("step_seconds", "Time spent in the steps of a stage."),
            ("tokens", "Text tokens, or codec frames, that a stage made."),
            ("preemptions", "Requests that lost their KV blocks and were computed again."),
        ):
            counter = CounterMetricFamily(f"{PREFIX}stage_{field}", text, labels=["model_name", "stage"])
            for stage, stats in health.stages.items():
                counter.add_metric([self._model_name, stage], getattr(stats, field))
            yield counter
        restarts = CounterMetricFamily(
            f"{PREFIX}process_restarts", "Restarts of a stage process.", labels=["model_name", "process"]
        )
        for name, process in health.processes.items():
            restarts.add_metric([self._model_name, name], process.restarts)
        yield restarts


class _MediaCollector(Collector):
    """Counters of the loader, read when they are asked for."""

    def __init__(self, model_name: str, stats: MediaStats) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for field, text in (
            ("decoded", "Images, clips and videos that were decoded."),
            ("cache_hits", "Images, clips and videos that had been decoded before."),
            ("refused", "Images, clips and videos that were refused."),
            ("fetch_seconds", "Time spent fetching media."),
            ("decode_seconds", "Time spent decoding media."),
        ):
            counter = CounterMetricFamily(f"{PREFIX}media_{field}", text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(self._stats, field))
            yield counter
