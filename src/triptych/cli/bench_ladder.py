"""`triptych bench ladder`: what each of the server's mechanisms is worth."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.bench_options import (
    RecordPath,
    RequestTimeout,
    ResultPath,
    StartTimeout,
    check_once,
    check_results,
    command_line,
    extra_fields,
    measured_ceilings,
    serve_arguments,
)
from triptych.cli.options import DeployConfigPath, Model, PlatformOption, StageOverrides, stoppable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.bench.ceilings import Ceilings
    from triptych.bench.ladder import RungResult
    from triptych.bench.measure import Measurement


def command(
    model: Model,
    deploy_config: DeployConfigPath = None,
    stage_overrides: StageOverrides = None,
    platform: PlatformOption = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be given again. [default: 1, 32]")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each level of concurrency.")] = 128,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, which are not measured.")] = 2,
    random_input_len: Annotated[int, typer.Option(min=1, help="Words a prompt.")] = 100,
    random_output_len: Annotated[int, typer.Option(min=1, help="Text tokens a reply.")] = 100,
    seed: Annotated[int, typer.Option(help="Of prompts and replies: the same at every step.")] = 0,
    extra_body: Annotated[
        str | None, typer.Option(help="More fields of each request, JSON; null takes one out: '{\"temperature\": 1}'.")
    ] = None,
    record: RecordPath = None,
    result_json: ResultPath = None,
    charts: Annotated[
        Path | None, typer.Option(help="Write PNG charts into this folder; needs triptych[charts].", metavar="DIR")
    ] = None,
    timeout: RequestTimeout = 600.0,
    start_timeout: StartTimeout = 900.0,
) -> None:
    """Serve MODEL again and again, each time with one mechanism more, and measure speech under the same load."""
    from triptych.bench import ceilings, ladder, machine, report
    from triptych.bench.charts import check_charts, draw
    from triptych.bench.driver import Load
    from triptych.bench.measure import Measurement
    from triptych.bench.workload import RandomWorkload, Reply

    levels = concurrency or [1, 32]
    check_once("--concurrency", levels)
    check_results(record, result_json)
    if charts is not None:
        check_charts(charts)
    reply = Reply(
        modalities=("text", "audio"),
        max_tokens=random_output_len,
        ignore_eos=True,
        extra={"seed": seed} | extra_fields(extra_body),
    )
    workload = RandomWorkload(input_len=random_input_len)
    measurements = [
        Measurement(workload, reply, Load(level), num_prompts, num_warmups, seed + index, timeout)
        for index, level in enumerate(levels)  # other prompts at each level: caches do not help
    ]
    arguments = serve_arguments(deploy_config, stage_overrides, platform)
    title = f"Ladder of {model} on {machine.name()}"
    results: list[RungResult] = []
    found: list[Ceilings] = []
    try:
        with stoppable():
            left_out = asyncio.run(_climb(model, arguments, measurements, start_timeout, results))
            if record is not None or result_json is not None:
                found = asyncio.run(measured_ceilings(ceilings.settings_of(results[-1].rung.deploy)))
    finally:  # what was measured before something went wrong is worth keeping
        if results:
            for index, level in enumerate(levels):
                ladder.grid(results, index).print(f"{title}, concurrency {level}")
        if results and result_json is not None:
            lengths = {"random_input_len": random_input_len, "random_output_len": random_output_len}
            content = {
                "model": model,
                "arguments": {"num_prompts": num_prompts, **lengths, "seed": seed, "extra_body": extra_body},
                "serve": arguments,
                "steps": [result.record(levels) for result in results],
            }
            report.write_json(result_json, report.record("bench ladder", content, found))
    if record is not None:
        about = [
            f"Command: `{command_line()}`. Each request: {random_input_len} words in, {random_output_len} text tokens "
            f"and the speech of them out; {num_prompts} requests at each level, all answered.",
            f"{machine.sentence()} {ceilings.sentence(found)}",
        ]
        if left_out:
            about.append(f"Left out, since this deploy config has nothing for them to change: {', '.join(left_out)}.")
        report.write_text(record, ladder.markdown(results, levels, title=title, about=about))
    if charts is not None:
        draw(charts, {result.rung.name: result.summaries for result in results}, levels, title)


async def _climb(
    model: str,
    arguments: Sequence[str],
    measurements: Sequence[Measurement],
    start_s: float,
    results: list[RungResult],
) -> list[str]:
    """Fills `results`; returns the names of the steps that were left out."""
    from triptych.bench.ladder import climb, rungs

    with tempfile.TemporaryDirectory(prefix="triptych-ladder-") as folder:
        steps, left_out = await rungs(model, arguments, Path(folder))
        for name in left_out:
            typer.echo(f"step: {name} is left out, it changes nothing in this deploy config", err=True)
        for rung in steps:
            typer.echo(f"step: {rung.name}", err=True)
            results.append(await climb(model, rung, measurements, start_s=start_s))
    return left_out
