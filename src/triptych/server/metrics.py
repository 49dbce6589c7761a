"""What `/metrics` says, in Prometheus' format; `docs/metrics.md` says what each means.

The times of requests are seconds, measured in this process, from the request's arrival. Requests without audio never
enter an audio histogram. A name means what the benchmark client means by it:

- `audio_ttfp_s`: arrival to first audio packet;
- `audio_rtf`: (last audio packet - arrival) / seconds of audio;
- `audio_underrun_s`: how long a listener who starts at the first packet and plays in real time hears nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from triptych.media.contract import MediaStats
from triptych.pipeline.health import PipelineHealth
from triptych.pipeline.request import MediaTokens
from triptych.server.collectors import MediaCollector, PipelineCollector
from triptych.server.stage_metrics import PREFIX
from triptych.telemetry.histogram import RATIOS, SECONDS

# Each would be a second name of a series, of which Prometheus makes nothing in the text format.
disable_created_metrics()  # type: ignore[no-untyped-call]

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
        self.registry.register(PipelineCollector(model_name, health))
        self.registry.register(MediaCollector(model_name, media))

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
