"""`triptych bench suite`: a file of servers and loads, run and held against its baseline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli.bench_options import RequestTimeout, ResultPath, StartTimeout, measured_ceilings
from triptych.cli.options import stoppable
from triptych.errors import ConfigError, TriptychError

if TYPE_CHECKING:
    from triptych.bench.ceilings import Ceilings
    from triptych.bench.suite import Suite
    from triptych.bench.suite_run import Setting, Tested


def command(
    file: Annotated[Path, typer.Argument(help="The suite, a JSON file.", metavar="FILE.json")],
    url: Annotated[
        str | None, typer.Option(help="A server that runs already. Default: one is started for each test.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Sent to --url as a bearer token.", envvar="TRIPTYCH_API_KEY", show_envvar=True)
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The name its baselines go by. Default: this machine's GPUs, or its CPU.")
    ] = None,
    margin: Annotated[float, typer.Option(min=0, help="How much worse than its baseline a number may be.")] = 0.1,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is measured into FILE instead of comparing with it.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often the tests are run, in turn; a number is the median of its rounds.")
    ] = 1,
    result_json: ResultPath = None,
    timeout: RequestTimeout = 600.0,
    start_timeout: StartTimeout = 900.0,
) -> None:
    """Run every test of a perf suite and compare it with the baseline of this hardware, or with another of its tests.

    Status 1 when a request failed, or a number is worse than its baseline by more than --margin.
    """
    from triptych.bench import ceilings, machine, report, suite_run
    from triptych.bench.suite import Suite
    from triptych.bench.suite_run import Setting

    suite = Suite.read(file)
    if url is not None and (paired := [test.test_name for test in suite.tests if test.baseline_test is not None]):
        raise ConfigError(f"--url is one server, and {', '.join(paired)} is compared with another one")
    if result_json is not None:
        report.check_result_path(result_json)
    if update_baseline:
        report.check_result_path(file, "--update-baseline")
    setting = Setting(
        hardware=hardware or machine.name(),
        url=url,
        api_key=api_key if url else None,
        start_s=start_timeout,
        timeout_s=timeout,
    )
    taken: list[Tested] = []
    results: list[Tested] = []
    found: list[Ceilings] = []
    try:
        with stoppable():
            try:
                asyncio.run(_run(suite, setting, rounds, taken))
            finally:
                results = suite_run.joined(taken, setting.hardware)
            if result_json is not None:
                deploys = [result.deploy for result in results if result.deploy is not None]
                wanted = [one for deploy in deploys for one in ceilings.settings_of(deploy)]
                found = asyncio.run(measured_ceilings(wanted))
    finally:  # what was measured before something went wrong is worth keeping
        if results:
            suite_run.grid(results).print(f"{file} on {setting.hardware}")
        if results and result_json is not None:
            content = suite_run.record(results, suite=str(file), setting=setting, margin=margin)
            report.write_json(result_json, report.record("bench suite", content, found))
    if failures := suite_run.failures(results):
        raise TriptychError("\n".join(["a run with failures is not compared with a baseline:", *failures]))
    if update_baseline:
        _write_baseline(file, suite, results, setting.hardware)
    else:
        _judge(results, setting.hardware, margin)


async def _run(suite: Suite, setting: Setting, rounds: int, taken: list[Tested]) -> None:
    """One test after the other, and again; a config that a server would refuse is found before the first one starts."""
    from triptych.bench.server import resolved_config
    from triptych.bench.suite_run import run_test

    deploys: list[dict[str, Any] | None] = []
    for test in suite.tests:
        params = test.server_params
        if setting.url is None:
            deploys.append(await resolved_config(params.model, *params.arguments))
        else:
            typer.echo(f"{test.test_name}: --url is measured as it runs; server_params have no effect", err=True)
            deploys.append(None)
    for round_ in range(rounds):
        for test, deploy in zip(suite.tests, deploys, strict=True):
            taken.append(await run_test(test, deploy, setting, round_))


def _write_baseline(file: Path, suite: Suite, results: list[Tested], hardware: str) -> None:
    from triptych.bench.report import write_json

    for written, result in zip(suite.written, results, strict=True):
        if result.test.baseline_test is not None:
            continue
        for block, sweep in zip(written["benchmark_params"], result.sweeps, strict=True):
            block.setdefault("baseline", {})[hardware] = sweep.baseline(hardware)
    write_json(file, suite.written)
    typer.echo(f"{file} has these numbers as the baseline of {hardware!r} now")


def _judge(results: list[Tested], hardware: str, margin: float) -> None:
    """Say what was compared. Raises TriptychError naming each regression."""
    from triptych.bench.suite_run import regressions

    for result in results:
        for sweep in result.sweeps:
            for comparison in sweep.comparisons:
                if comparison.of:
                    typer.echo(f"{sweep.name}: {comparison}")
            if not sweep.comparisons:
                others = ", ".join(map(repr, sweep.params.baseline)) or "nothing"
                typer.echo(f"{sweep.name}: no baseline of {hardware!r}; the file has {others}")
    if worse := regressions(results, margin):
        lines = "\n".join(f"  {line}" for line in worse)
        raise TriptychError(f"worse than the baseline by more than {margin:.0%}:\n{lines}")
    compared = sum(len(sweep.comparisons) for result in results for sweep in result.sweeps)
    if compared:
        typer.echo(f"{compared} numbers are within {margin:.0%} of their baseline, or better")
