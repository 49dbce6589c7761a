"""What is read when it is asked for: the pipeline, its stages by their last heartbeat, and the loader of media."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.media.contract import MediaStats
from triptych.pipeline.health import PipelineHealth
from triptych.server.stage_metrics import PREFIX, stage_metrics


class PipelineCollector(Collector):
    """The requests of the whole pipeline, and its processes."""

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
        restarts = CounterMetricFamily(
            f"{PREFIX}process_restarts", "Restarts of a stage process.", labels=["model_name", "process"]
        )
        for name, process in health.processes.items():
            restarts.add_metric([self._model_name, name], process.restarts)
        yield restarts
        yield from stage_metrics(self._model_name, tuple(health.stages.values()))


class MediaCollector(Collector):
    """Counters of the loader."""

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
