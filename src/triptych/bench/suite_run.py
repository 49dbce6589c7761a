"""Runs the tests of a suite: their servers, every point of their sweeps, and what they say against the baseline."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from triptych.bench.baseline import Comparison, compare, measured_baseline
from triptych.bench.grid import NUMBERS, Grid, cells
from triptych.bench.metrics import summarise
from triptych.bench.report import watched
from triptych.bench.server import START_S, served
from triptych.bench.suite import BenchmarkParams, SuiteTest
from triptych.bench.target import find_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a suite is run with. `url` is that of a server which runs already; None starts one for each test."""

    hardware: str
    url: str | None = None
    api_key: str | None = None
    start_s: float = START_S
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What became of one entry of `benchmark_params`: a summary for each point, which after several `rounds` is the
    median of theirs, and the server's fingerprints."""

    name: str
    params: BenchmarkParams
    summaries: list[dict[str, Any]]
    fingerprints: list[str]
    comparisons: Sequence[Comparison] = ()
    rounds: Sequence[list[dict[str, Any]]] = ()

    def baseline(self, hardware: str | None) -> dict[str, list[float]]:
        """The measured values, of the metrics that the file has for this hardware or of the usual ones."""
        metrics = list(self.params.baseline.get(hardware, ())) if hardware is not None else []
        speaks = self.params.measurements(1.0)[0].reply.speaks
        return measured_baseline(metrics, self.summaries, speaks=speaks)

    def record(self, margin: float) -> dict[str, Any]:
        return {
            "params": msgspec.to_builtins(self.params),
            "points": [
                {"point": label, **summary} for label, summary in zip(self.params.labels, self.summaries, strict=True)
            ],
            "rounds": list(self.rounds),
            "fingerprints": self.fingerprints,
            "comparisons": [
                msgspec.to_builtins(comparison) | {"ratio": comparison.ratio, "regressed": comparison.regressed(margin)}
                for comparison in self.comparisons
            ],
        }


@dataclass(frozen=True, slots=True)
class Tested:
    """`deploy` is the resolved config of the server that was started, `about` what it says of its model."""

    test: SuiteTest
    deploy: dict[str, Any] | None
    start_up_s: float | None
    about: dict[str, Any]
    sweeps: list[Sweep]

    def record(self, margin: float) -> dict[str, Any]:
        return {
            "test_name": self.test.test_name,
            "server_params": msgspec.to_builtins(self.test.server_params),
            "deploy": self.deploy,
            "start_up_s": self.start_up_s,
            "server": self.about,
            "benchmarks": [sweep.record(margin) for sweep in self.sweeps],
        }


async def run_test(test: SuiteTest, deploy: dict[str, Any] | None, setting: Setting, round_: int = 0) -> Tested:
    """One round of a test; each has prompts of its own, the same as other tests with the same loads.

    Raises TriptychError if the server does not start, ends by itself, or answers no warm-up request; ConfigError for an
    address that cannot be right.
    """
    params = test.server_params
    before = round_ * sum(block.num_points for block in test.benchmark_params)
    async with AsyncExitStack() as stack:
        url, start_up_s = setting.url, None
        if url is None:
            server = await stack.enter_async_context(served(params.model, *params.arguments, start_s=setting.start_s))
            url, start_up_s = server.url, server.start_up_s
        sweeps: list[Sweep] = []
        about: dict[str, Any] = {}
        for index, block in enumerate(test.benchmark_params, 1):
            name = test.test_name if len(test.benchmark_params) == 1 else f"{test.test_name} #{index}"
            target = await find_target(url, block.endpoint, None, setting.api_key)
            about = target.about
            points_before = before + sum(len(sweep.summaries) for sweep in sweeps)
            runs = [
                await watched(measurement, target, setting.api_key)
                for measurement in block.measurements(setting.timeout_s, points_before=points_before)
            ]
            summaries = [summarise(run) for run in runs]
            fingerprints = sorted({mark for run in runs for mark in run.fingerprints})
            sweeps.append(Sweep(name, block, summaries, fingerprints))
    return Tested(test, deploy, start_up_s, about, sweeps)


def joined(rounds: Sequence[Tested], hardware: str) -> list[Tested]:
    """Each test once, over all its rounds, and compared with its baseline."""
    found: dict[str, Tested] = {}
    for name in dict.fromkeys(one.test.test_name for one in rounds):
        of_test = [one for one in rounds if one.test.test_name == name]
        sweeps = []
        for index, first in enumerate(of_test[0].sweeps):
            taken = [one.sweeps[index].summaries for one in of_test]
            summaries = [median(point) for point in zip(*taken, strict=True)]
            labels = first.params.labels
            if other := of_test[0].test.baseline_test:
                theirs = [one.sweeps[index].summaries for one in rounds if one.test.test_name == other]
                baseline = found[other].sweeps[index].baseline(None)
                comparisons = compare(baseline, labels, summaries, other, list(zip(theirs, taken, strict=True)))
            else:
                comparisons = compare(first.params.baseline.get(hardware, {}), labels, summaries)
            kept = taken if len(taken) > 1 else ()
            sweeps.append(replace(first, summaries=summaries, comparisons=comparisons, rounds=kept))
        found[name] = replace(of_test[0], sweeps=sweeps)
    return list(found.values())


def median(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of several rounds: the median of each number, the sums of requests, all that failed."""
    found: dict[str, Any] = {}
    for name in summaries[0]:
        values = [value for summary in summaries if (value := summary[name]) is not None]
        if name in ("completed", "failed"):
            found[name] = sum(values)
        elif name == "failures":
            found[name] = dict(sum(map(Counter, values), Counter[str]()))
        elif name == "failure_examples":
            found[name] = {reason: detail for value in values for reason, detail in value.items()}
        elif name == "output_tokens_counted_by":
            found[name] = values[0] if len(set(values)) == 1 else "mixed" if values else None
        else:
            found[name] = statistics.median(values) if values else None
    return found


def grid(results: Sequence[Tested]) -> Grid:
    """A row for each point."""
    table = Grid(["test", "load", "answered, failed", *NUMBERS])
    for result in results:
        for sweep in result.sweeps:
            for label, summary in zip(sweep.params.labels, sweep.summaries, strict=True):
                counts = f"{summary['completed']}, {summary['failed']}"
                table.rows.append([sweep.name, label, counts, *cells(summary)])
    return table


def record(results: Sequence[Tested], *, suite: str, setting: Setting, margin: float) -> dict[str, Any]:
    """What a result file holds, beside the date, the machine and the versions."""
    return {
        "suite": suite,
        "baseline_hardware": setting.hardware,
        "margin": margin,
        "url": setting.url,
        "tests": [result.record(margin) for result in results],
        "regressions": regressions(results, margin),
    }


def failures(results: Sequence[Tested]) -> list[str]:
    """A sentence for each point at which requests failed."""
    return [
        f"{sweep.name} at {label}: {count} requests failed: {reason}: {summary['failure_examples'][reason] or '-'}"
        for result in results
        for sweep in result.sweeps
        for label, summary in zip(sweep.params.labels, sweep.summaries, strict=True)
        for reason, count in summary["failures"].items()
    ]


def regressions(results: Sequence[Tested], margin: float) -> list[str]:
    """A sentence for each."""
    return [
        f"{sweep.name}: {comparison}"
        for result in results
        for sweep in result.sweeps
        for comparison in sweep.comparisons
        if comparison.regressed(margin)
    ]
