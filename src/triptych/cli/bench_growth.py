"""`triptych bench growth`: what more streams, and longer ones, cost."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
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
    measured_ceilings,
    serve_arguments,
)
from triptych.cli.options import DeployConfigPath, Model, PlatformOption, StageOverrides, stoppable
from triptych.errors import TriptychError

if TYPE_CHECKING:
    from triptych.bench.ceilings import Ceilings
    from triptych.bench.growth import Growth, Point, Speech

LEVELS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def command(
    model: Model,
    deploy_config: DeployConfigPath = None,
    stage_overrides: StageOverrides = None,
    platform: PlatformOption = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Streams at a time; may be given again. [default: 1, 2, 4, 8, 16, 32, 64]"),
    ] = None,
    stream_seconds: Annotated[float, typer.Option(min=0.08, help="Speech of each of these streams.")] = 10.0,
    seconds: Annotated[
        list[float] | None,
        typer.Option(
            min=0.08, help="Speech of one stream alone; may be given again. [default: 1, 3, 10, 30, 100, 300]"
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Requests at each level of concurrency; twice the level if that is more.")
    ] = 4,
    random_input_len: Annotated[int, typer.Option(min=1, help="Words a prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="Of prompts.")] = 0,
    fail_above: Annotated[
        float | None, typer.Option(min=1.0, help="Status 1 where growth is more than so many times the linear one.")
    ] = None,
    record: RecordPath = None,
    result_json: ResultPath = None,
    timeout: RequestTimeout = 600.0,
    start_timeout: StartTimeout = 900.0,
) -> None:
    """Serve MODEL, and measure what each stage takes for a token, and the memory of a stream, as load and length grow.

    Linear is: a token costs the same beside any number of streams and, but for what attention has more to read, at any
    place of any utterance.
    """
    from triptych.bench import ceilings, growth_report, machine, report
    from triptych.bench.growth import Speech, check_places
    from triptych.bench.server import resolved_config

    levels, lengths = sorted(concurrency or LEVELS), sorted(seconds or SECONDS)
    for option, values in (("--concurrency", levels), ("--seconds", lengths)):
        check_once(option, values)
    check_results(record, result_json)
    arguments = serve_arguments(deploy_config, stage_overrides, platform)
    title = f"Growth of {model} on {machine.name()}"
    results: list[Growth] = []
    found: list[Ceilings] = []
    with stoppable():
        deploy = asyncio.run(resolved_config(model, *arguments))
        check_places(levels, deploy)
        each = Speech.of(stream_seconds, deploy, "--stream-seconds")
        alone = [Speech.of(length, deploy, "--seconds") for length in lengths]
        runs = [(level, each, max(num_prompts, 2 * level)) for level in levels]
        try:
            asyncio.run(
                _measure(model, arguments, runs, alone, random_input_len, seed, timeout, start_timeout, results)
            )
        finally:  # what was measured before something went wrong is worth keeping
            if results:
                [growth] = results
                found = asyncio.run(measured_ceilings(growth.settings))
                for heading, table in growth_report.grids(growth, found):
                    table.print(f"{title}: {heading}")
                for note in growth_report.notes(growth):
                    typer.echo(note)
            if results and result_json is not None:
                asked = {"concurrency": levels, "stream_seconds": stream_seconds, "seconds": lengths}
                asked |= {"num_prompts": num_prompts, "random_input_len": random_input_len, "seed": seed}
                content = {
                    "model": model,
                    "arguments": asked,
                    "serve": arguments,
                    "deploy": deploy,
                    **growth_report.record(growth, found, fail_above),
                }
                report.write_json(result_json, report.record("bench growth", content, found))
    if record is not None:
        about = [
            f"Command: `{command_line()}`. {random_input_len} words in each prompt; replies of exactly the length "
            "asked for. A token is a text token of the Thinker, a codec frame (80 ms) of Talker and Code2Wav.",
            f"{machine.sentence()} {ceilings.sentence(found)}",
        ]
        report.write_text(record, growth_report.markdown(growth, found, title=title, about=about))
    if fail_above is not None and (more := growth_report.exceeded(growth, found, fail_above)):
        raise TriptychError("\n".join([f"growth of more than {fail_above:g} times the linear one:", *more]))


async def _measure(
    model: str,
    arguments: Sequence[str],
    runs: Sequence[tuple[int, Speech, int]],
    alone: Sequence[Speech],
    words: int,
    seed: int,
    timeout_s: float,
    start_s: float,
    results: list[Growth],
) -> None:
    """One server for all; each point has prompts of its own, so caches do not help."""
    from triptych.bench.growth import LEAST_S, Growth, measure
    from triptych.bench.server import served
    from triptych.bench.target import find_target
    from triptych.bench.watch import settled

    async with served(model, *arguments, start_s=start_s) as server:
        target = await find_target(server.url, "/v1/chat/completions", None, None)
        seeds = itertools.count(seed)

        async def point(streams: int, speech: Speech, count: int) -> Point:
            given = {"streams": streams, "count": count, "words": words, "seed": next(seeds)}
            return await measure(server, target, speech=speech, timeout_s=timeout_s, **given)

        await point(1, runs[0][1], 1)  # what is made at a first request is made
        growth = Growth(await settled(server))
        results.append(growth)
        for level, speech, count in runs:
            typer.echo(f"concurrency {level}, {speech.seconds:g} s of speech each", err=True)
            growth.streams.append(await point(level, speech, count))
        for speech in alone:
            typer.echo(f"{speech.seconds:g} s of speech, alone", err=True)
            growth.lengths.append(await point(1, speech, math.ceil(LEAST_S / speech.seconds)))
