"""What was measured against what was measured before on the same hardware."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.bench.metrics import DISTRIBUTIONS, STATISTICS

_HIGHER = (
    "request_throughput",
    "output_throughput",
    "audio_throughput",
    "streams_without_underrun_ratio",
)
_LOWER = (
    "total_audio_underrun_s",
    *(f"{statistic}_{name}" for name in DISTRIBUTIONS if name != "audio_duration_s" for statistic in STATISTICS),
)
COMPARED = (*_HIGHER, *_LOWER)  # more is better of the first, less of the others
# What `--update-baseline` writes where the file names no metrics.
USUAL = ("output_throughput", "mean_ttft_ms", "mean_e2el_ms")
USUAL_SPOKEN = (*USUAL, "audio_throughput", "mean_audio_ttfp_ms", "mean_audio_rtf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric at one point of a sweep. `measured` is None if there was nothing to measure; `of` is the test that the
    baseline was measured by in the same run, empty for one that was written down. `ratios` are then those of the
    rounds, in each of which both tests were measured in turn: what slows a whole machine for a while slows both."""

    metric: str
    point: str
    baseline: float
    measured: float | None
    of: str = ""
    ratios: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """What was measured, of the baseline: of several rounds the median, None where the baseline is nothing."""
        if self.ratios:
            return statistics.median(self.ratios)
        return self.measured / self.baseline if self.measured is not None and self.baseline else None

    def regressed(self, margin: float) -> bool:
        """Whether it is worse by more than `margin`, a share of the baseline."""
        if self.measured is None:
            return True
        if self.ratio is None:
            return self.metric not in _HIGHER and self.measured > 0
        return self.ratio < 1 - margin if self.metric in _HIGHER else self.ratio > 1 + margin

    def __str__(self) -> str:
        baseline = f"{self.of} has" if self.of else "the baseline is"
        if self.measured is None:
            return f"{self.metric} at {self.point}: nothing was measured, {baseline} {self.baseline:g}"
        change = "" if self.ratio is None else f", {self.ratio - 1:+.1%}"
        if len(self.ratios) > 1:
            change += f" in the median of {len(self.ratios)} rounds"
        less_or_more = "more" if self.metric in _HIGHER else "less"
        return (
            f"{self.metric} at {self.point}: {self.measured:.4g}, {baseline} {self.baseline:.4g}{change} "
            f"({less_or_more} is better)"
        )


def compare(
    baseline: Mapping[str, Sequence[float]],
    points: Sequence[str],
    summaries: Sequence[Mapping[str, Any]],
    of: str = "",
    rounds: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = (),
) -> list[Comparison]:
    """Every metric of a baseline at every point of the sweep, in that order. `rounds`: the summaries of the points in
    each round, of the test `of` and of this one."""
    found = []
    for metric, values in baseline.items():
        for index, (point, value, summary) in enumerate(zip(points, values, summaries, strict=True)):
            pairs = [(theirs[index][metric], ours[index][metric]) for theirs, ours in rounds]
            ratios = tuple(ours / theirs for theirs, ours in pairs if theirs and ours is not None)
            found.append(Comparison(metric, point, value, summary[metric], of, ratios))
    return found


def measured_baseline(
    metrics: Sequence[str], summaries: Sequence[Mapping[str, Any]], *, speaks: bool
) -> dict[str, list[float]]:
    """The values of a run as a baseline: of `metrics`, or of the usual ones. One that nothing was measured of, at some
    point of the sweep, is left out."""
    names = metrics or (USUAL_SPOKEN if speaks else USUAL)
    found = {name: [summary[name] for summary in summaries] for name in names}
    return {name: [float(f"{value:.5g}") for value in values] for name, values in found.items() if None not in values}
