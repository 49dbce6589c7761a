"""Runs one test of a suite: its server, every point of its sweeps, and what they say against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
    """What became of one entry of `benchmark_params`: a summary and the server's fingerprints for each point."""

    name: str
    params: BenchmarkParams
    summaries: list[dict[str, Any]]
    fingerprints: list[str]
    comparisons: list[Comparison]

    def baseline(self, hardware: str) -> dict[str, list[float]]:
        """The measured values, of the metrics that the file has for this hardware or of the usual ones."""
        metrics = list(self.params.baseline.get(hardware, ()))
        speaks = self.params.measurements(1.0)[0].reply.speaks
        return measured_baseline(metrics, self.summaries, speaks=speaks)

    def record(self, margin: float) -> dict[str, Any]:
        return {
            "params": msgspec.to_builtins(self.params),
            "points": [
                {"point": label, **summary} for label, summary in zip(self.params.labels, self.summaries, strict=True)
            ],
            "fingerprints": self.fingerprints,
            "comparisons": [
                msgspec.to_builtins(comparison) | {"regressed": comparison.regressed(margin)}
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


async def run_test(test: SuiteTest, deploy: dict[str, Any] | None, setting: Setting) -> Tested:
    """Raises TriptychError if the server does not start, ends by itself, or answers no warm-up request; ConfigError for
    an address that cannot be right."""
    params = test.server_params
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
            points_before = sum(len(sweep.summaries) for sweep in sweeps)
            runs = [
                await watched(measurement, target, setting.api_key)
                for measurement in block.measurements(setting.timeout_s, points_before=points_before)
            ]
            summaries = [summarise(run) for run in runs]
            comparisons = compare(block.baseline.get(setting.hardware, {}), block.labels, summaries)
            fingerprints = sorted({mark for run in runs for mark in run.fingerprints})
            sweeps.append(Sweep(name, block, summaries, fingerprints, comparisons))
    return Tested(test, deploy, start_up_s, about, sweeps)


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
