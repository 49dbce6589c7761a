"""What the stages count, as metric families with one series for each replica of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from triptych.config.schema import StageKind
from triptych.connectors.wire import StageStats
from triptych.telemetry.histogram import Histogram

PREFIX = "triptych:"
LABELS = ("model_name", "stage", "replica")

T = TypeVar("T")


@dataclass(frozen=True)
class _Family(Generic[T]):
    """One metric of every stage in `stages`."""

    name: str
    text: str
    value: Callable[[StageStats], T]
    stages: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")


_DECODERS: tuple[StageKind, ...] = ("thinker", "talker")
_ENCODER: tuple[StageKind, ...] = ("thinker",)

_GAUGES: tuple[_Family[float], ...] = (
    _Family("stage_running_requests", "Requests that a stage is working on.", lambda stage: stage.running),
    _Family("stage_waiting_requests", "Requests that wait for room in a stage.", lambda stage: stage.waiting),
    _Family("stage_parked_requests", "Requests that wait for the stage after theirs.", lambda stage: stage.parked),
    _Family(
        "kv_cache_usage_perc",
        "Share of the KV blocks that requests hold; 1 is all of them.",
        lambda stage: stage.kv_blocks_used / max(stage.kv_blocks_total, 1),
        _DECODERS,
    ),
    _Family("kv_cache_blocks", "KV blocks of a stage.", lambda stage: stage.kv_blocks_total, _DECODERS),
)
_COUNTERS: tuple[_Family[float], ...] = (
    _Family("stage_tokens", "Text tokens drawn, codec frames drawn, or decoded.", lambda stage: stage.counts.tokens),
    _Family(
        "stage_moved_bytes",
        "Bytes that the steps had to move at least, by the model's config.",
        lambda stage: stage.counts.moved_bytes,
    ),
    _Family(
        "stage_flops",
        "Floating-point operations that the steps had to do, by the model's config.",
        lambda stage: stage.counts.flops,
    ),
    _Family(
        "num_preemptions",
        "Requests that lost their KV blocks and were computed again.",
        lambda stage: stage.counts.preemptions,
        _DECODERS,
    ),
    _Family(
        "prefix_cache_queries",
        "Tokens that were looked for in the prefix cache.",
        lambda stage: stage.counts.prefix_queries,
        _DECODERS,
    ),
    _Family(
        "prefix_cache_hits", "Tokens that the prefix cache held.", lambda stage: stage.counts.prefix_hits, _DECODERS
    ),
    _Family(
        "encoder_cache_queries",
        "Images, clips and videos that were looked for among the encoded ones.",
        lambda stage: stage.counts.encoder_queries,
        _ENCODER,
    ),
    _Family(
        "encoder_cache_hits",
        "Images, clips and videos that had been encoded before.",
        lambda stage: stage.counts.encoder_hits,
        _ENCODER,
    ),
)
_HISTOGRAMS: tuple[_Family[Histogram], ...] = (
    _Family("stage_step_time_s", "Time of a step.", lambda stage: stage.counts.step_time_s),
    _Family("stage_batch_size", "Requests in a step.", lambda stage: stage.counts.batch_size),
    _Family(
        "stage_step_tokens", "Rows computed, or frames decoded, in a step.", lambda stage: stage.counts.step_tokens
    ),
    _Family(
        "encoder_step_time_s",
        "Time of encoding between two steps.",
        lambda stage: stage.counts.encoder_step_time_s,
        _ENCODER,
    ),
    _Family(
        "request_queue_wait_s",
        "From when a request could begin in a stage to its first step.",
        lambda stage: stage.counts.queue_wait_s,
    ),
    _Family(
        "stage_gen_time_s",
        "From the first step of a request in a stage to its end there.",
        lambda stage: stage.counts.gen_time_s,
    ),
)
_OUTCOMES: tuple[tuple[str, Callable[[StageStats], int]], ...] = (
    ("finished", lambda stage: stage.counts.gen_time_s.count),
    ("failed", lambda stage: stage.counts.failed),
    ("aborted", lambda stage: stage.counts.aborted),
)


def stage_metrics(model_name: str, stages: Sequence[StageStats]) -> Iterator[Metric]:
    """Every family, those included of which no stage has a series."""

    def series(family: _Family[T]) -> Iterator[tuple[list[str], T]]:
        for stage in stages:
            if stage.stage in family.stages:
                yield _labels(model_name, stage), family.value(stage)

    for level in _GAUGES:
        gauge = GaugeMetricFamily(PREFIX + level.name, level.text, labels=LABELS)
        for labels, value in series(level):
            gauge.add_metric(labels, value)
        yield gauge
    for count in _COUNTERS:
        counter = CounterMetricFamily(PREFIX + count.name, count.text, labels=LABELS)
        for labels, value in series(count):
            counter.add_metric(labels, value)
        yield counter
    for spread in _HISTOGRAMS:
        histogram = HistogramMetricFamily(PREFIX + spread.name, spread.text, labels=LABELS)
        for labels, values in series(spread):
            histogram.add_metric(labels, _buckets(values), values.total)
        yield histogram
    yield _info(model_name, stages)
    yield _outcomes(model_name, stages)
    yield from _transfers(model_name, stages)


def _info(model_name: str, stages: Sequence[StageStats]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}stage_info", "1; what a stage computes with.", labels=[*LABELS, "device", "dtype", "threads"]
    )
    for stage in stages:
        if stage.device:
            family.add_metric([*_labels(model_name, stage), stage.device, stage.dtype, str(stage.threads)], 1)
    return family


def _outcomes(model_name: str, stages: Sequence[StageStats]) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}stage_requests", "Requests that a stage is done with.", labels=[*LABELS, "outcome"]
    )
    for stage in stages:
        for outcome, value in _OUTCOMES:
            family.add_metric([*_labels(model_name, stage), outcome], value(stage))
    return family


def _transfers(model_name: str, stages: Sequence[StageStats]) -> Iterator[Metric]:
    labels = [*LABELS, "to_stage"]
    sizes = HistogramMetricFamily(f"{PREFIX}transfer_size_bytes", "Payload of a handoff.", labels=labels)
    seconds = HistogramMetricFamily(f"{PREFIX}transfer_tx_s", "Time to hand a handoff over.", labels=labels)
    for stage in stages:
        for target, counts in stage.counts.transfers.items():
            edge = [*_labels(model_name, stage), str(target)]
            sizes.add_metric(edge, _buckets(counts.size_bytes), counts.size_bytes.total)
            seconds.add_metric(edge, _buckets(counts.tx_s), counts.tx_s.total)
    yield sizes
    yield seconds


def _labels(model_name: str, stage: StageStats) -> list[str]:
    return [model_name, str(stage.stage), str(stage.replica)]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulated, and named by upper bound, as Prometheus has them."""
    names = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(names, accumulate(histogram.counts), strict=True))
