"""`triptych bench`: measure servers as their users see them. `serve` is here, the other commands are beside it."""

from __future__ import annotations

import asyncio
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli import bench_growth, bench_ladder, bench_machine, bench_peers, bench_suite
from triptych.cli.bench_options import RequestTimeout, ResultPath, extra_fields, measured_ceilings
from triptych.cli.options import stoppable
from triptych.errors import ConfigError, TriptychError

if TYPE_CHECKING:
    from triptych.bench.ceilings import Ceilings
    from triptych.bench.driver import Run
    from triptych.bench.measure import Measurement
    from triptych.bench.roofline import StageRates
    from triptych.bench.target import Target
    from triptych.bench.workload import Reply, Workload

app = typer.Typer(help="Measure servers as their users see them.", no_args_is_help=True)


class DatasetName(StrEnum):
    random = "random"
    file = "file"


app.command("suite")(bench_suite.command)
app.command("ladder")(bench_ladder.command)
app.command("growth")(bench_growth.command)
app.command("peers")(bench_peers.command)
app.command("machine")(bench_machine.command)


@app.callback()
def _root() -> None: ...


@app.command("serve")
def serve(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="The server: Triptych or any other of OpenAI's shape.")] = (
        "http://127.0.0.1:8091"
    ),
    model: Annotated[str | None, typer.Option(help="The served name. Default: the server's first one.")] = None,
    endpoint: Annotated[str, typer.Option(help="The path that takes chat completions.")] = "/v1/chat/completions",
    api_key: Annotated[
        str | None, typer.Option(help="Sent as a bearer token.", envvar="TRIPTYCH_API_KEY", show_envvar=True)
    ] = None,
    dataset_name: Annotated[DatasetName, typer.Option(help="Made-up prompts, or those of a file.")] = (
        DatasetName.random
    ),
    dataset_path: Annotated[Path | None, typer.Option(help="JSON lines: prompt or messages, and media.")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests. Default: 100, or every line of the file once.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, which are not measured.")] = 1,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at a time. Default: all.")] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, at random (Poisson) times; inf: as soon as there is a place.")
    ] = math.inf,
    seed: Annotated[int, typer.Option(help="Of prompts, media and arrival times.")] = 0,
    random_input_len: Annotated[int | None, typer.Option(min=1, help="Words a prompt. [default: 128]")] = None,
    random_output_len: Annotated[int | None, typer.Option(min=1, help="Most text tokens. [default: 128]")] = None,
    random_image: Annotated[int | None, typer.Option(min=0, help="Images a request.")] = None,
    random_image_size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT. [default: 448x448]")] = None,
    random_audio: Annotated[int | None, typer.Option(min=0, help="Clips of sound a request.")] = None,
    random_audio_seconds: Annotated[float | None, typer.Option(min=0.1, help="Of each. [default: 5]")] = None,
    random_video: Annotated[int | None, typer.Option(min=0, help="Videos a request.")] = None,
    random_video_size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT. [default: 320x192]")] = None,
    random_video_seconds: Annotated[float | None, typer.Option(min=0.1, help="Of each. [default: 4]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most text tokens, of a line that says none.")] = None,
    modalities: Annotated[str, typer.Option(help="text; text,audio; or audio.")] = "text",
    voice: Annotated[str | None, typer.Option(help="audio.voice. Default: the server's.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Text of the full length.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Of the text. Default: the server's.")] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="More fields of each request, JSON; null takes one out: '{\"seed\": 7}'.")
    ] = None,
    timeout: RequestTimeout = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A target: ttft, tpot, e2el, ttfp, underrun in ms, or rtf; ttft:300. May be given again."),
    ] = None,
    result_json: ResultPath = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Every request's numbers as well.")] = False,
    fail_on_error: Annotated[bool, typer.Option("--fail-on-error", help="Status 1 if any request failed.")] = False,
) -> None:
    """Send requests to a running server and report latencies, throughput, and what a listener would hear.

    Status 1 when every request failed, or audio was asked for and none came.
    """
    from triptych.bench import metrics, report, roofline
    from triptych.bench.driver import Load
    from triptych.bench.measure import Measurement
    from triptych.bench.target import find_target

    given = dict(context.params)
    reply = _reply(given)
    targets = metrics.parse_targets(goodput or [], speaks=reply.speaks)
    if not request_rate > 0:
        raise ConfigError(f"--request-rate {request_rate:g} is not more than 0; leave it out for no limit")
    if save_detailed and result_json is None:
        raise ConfigError("--save-detailed goes into a file; give --result-json as well")
    if result_json is not None:
        report.check_result_path(result_json)
    workload = _workload(given)
    measurement = Measurement(
        workload=workload,
        reply=reply,
        load=Load(max_concurrency, request_rate, seed),
        num_prompts=num_prompts or workload.usual_count,
        num_warmups=num_warmups,
        seed=seed,
        timeout_s=timeout,
    )
    with stoppable():
        target = asyncio.run(find_target(base_url, endpoint, model, api_key))
        run, stages, found = asyncio.run(_take(measurement, target, base_url, api_key))
    summary = metrics.summarise(run, targets)
    report.print_table(summary, title=f"{target.model} at {base_url}", speaks=reply.speaks)
    if stages:
        roofline.grid(stages).print("stages while they were stepping, warm-up included")
        if not roofline.on_this_machine(base_url):
            typer.echo(
                "no shares: the server is on another machine; triptych bench machine measures its ceilings there"
            )
    if result_json is not None:
        arguments = _arguments(given, measurement, target)
        server: dict[str, Any] = {
            "model": target.about,
            "fingerprints": run.fingerprints,
            "stages": roofline.record(stages),
        }
        result = report.record("bench serve", {**summary, "arguments": arguments, "server": server}, found)
        if save_detailed:
            result["requests"] = [outcome.record() for outcome in run.outcomes]
        report.write_json(result_json, result)
    _judge(summary, speaks=reply.speaks, fail_on_error=fail_on_error)


async def _take(
    measurement: Measurement, target: Target, base_url: str, api_key: str | None
) -> tuple[Run, list[StageRates], list[Ceilings]]:
    """The run; what the stages of the server achieved meanwhile, if it tells; and what this machine can do, if the
    server is on it."""
    from triptych.bench import report, roofline
    from triptych.bench.target import base_of

    base = base_of(base_url)
    before = await roofline.scrape(base)
    run = await report.watched(measurement, target, api_key)
    measurable = roofline.settings(before) if roofline.on_this_machine(base) else []
    # In between the stages send the heartbeat that has the last steps.
    found = await measured_ceilings(measurable)
    return run, roofline.rates(before, await roofline.scrape(base) if before else {}, found), found


def _reply(given: dict[str, Any]) -> Reply:
    """How answers are to be. Raises ConfigError for modalities, fields or combinations that cannot be."""
    from triptych.bench.workload import MODALITIES, Reply

    modalities = tuple(name.strip() for name in given["modalities"].split(","))
    if modalities not in MODALITIES:
        raise ConfigError(f"--modalities {given['modalities']!r} must be text, or text,audio, or audio")
    if given["voice"] is not None and "audio" not in modalities:
        raise ConfigError("--voice is for speech; give --modalities text,audio as well")
    output_len = given["random_output_len"]
    return Reply(
        modalities=modalities,
        voice=given["voice"],
        max_tokens=given["max_tokens"] if given["dataset_name"] is DatasetName.file else output_len or 128,
        ignore_eos=given["ignore_eos"],
        temperature=given["temperature"],
        extra=extra_fields(given["extra_body"]),
    )


def _workload(given: dict[str, Any]) -> Workload:
    """What is asked. Raises ConfigError for options of the other kind of workload, and what cannot be read."""
    from triptych.bench.workload import FileWorkload, RandomWorkload

    if given["dataset_name"] is DatasetName.file:
        for name, value in given.items():
            if name.startswith("random_") and value is not None:
                raise ConfigError(f"{_flag(name)} is for --dataset-name random, not for a file")
        if given["dataset_path"] is None:
            raise ConfigError("--dataset-name file needs --dataset-path")
        return FileWorkload.read(given["dataset_path"])
    if given["dataset_path"] is not None:
        raise ConfigError("--dataset-path is for --dataset-name file")
    if given["max_tokens"] is not None:
        raise ConfigError("--max-tokens is for --dataset-name file; a random workload has --random-output-len")
    for kind, details in (("image", ["size"]), ("audio", ["seconds"]), ("video", ["size", "seconds"])):
        for detail in details:
            if given[f"random_{kind}_{detail}"] is not None and not given[f"random_{kind}"]:
                raise ConfigError(f"--random-{kind}-{detail} needs --random-{kind}, how many a request has")
    fields = {
        "input_len": given["random_input_len"],
        "images": given["random_image"],
        "audios": given["random_audio"],
        "videos": given["random_video"],
        "image_size": _size("random_image_size", given),
        "audio_s": given["random_audio_seconds"],
        "video_size": _size("random_video_size", given),
        "video_s": given["random_video_seconds"],
    }
    return RandomWorkload(**{name: value for name, value in fields.items() if value is not None})


def _size(name: str, given: dict[str, Any]) -> tuple[int, int] | None:
    """Width and height; even, as video wants it."""
    if (written := given[name]) is None:
        return None
    sides = [int(side) for side in written.lower().split("x") if side.isascii() and side.isdecimal()]
    if (
        len(sides) != 2
        or len(written.split("x")) != 2
        or not all(2 <= side <= 8192 and side % 2 == 0 for side in sides)
    ):
        raise ConfigError(f"{_flag(name)} {written!r} is not WIDTHxHEIGHT, both even and from 2 to 8192")
    return sides[0], sides[1]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _arguments(given: dict[str, Any], measurement: Measurement, target: Target) -> dict[str, Any]:
    """Everything that was asked for, defaults filled in, without the key."""
    from triptych.bench.workload import RandomWorkload

    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    del arguments["api_key"]
    rate = measurement.load.request_rate
    arguments |= {
        "model": target.model,
        "num_prompts": measurement.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
    }
    workload = measurement.workload
    if isinstance(workload, RandomWorkload):
        arguments |= {
            "random_input_len": workload.input_len,
            "random_output_len": measurement.reply.max_tokens,
            "random_image": workload.images,
            "random_image_size": "x".join(map(str, workload.image_size)),
            "random_audio": workload.audios,
            "random_audio_seconds": workload.audio_s,
            "random_video": workload.videos,
            "random_video_size": "x".join(map(str, workload.video_size)),
            "random_video_seconds": workload.video_s,
        }
    else:
        arguments["dataset_lines"] = len(workload.lines)
    return arguments


def _judge(summary: dict[str, Any], *, speaks: bool, fail_on_error: bool) -> None:
    """Raises TriptychError, which is status 1, for a run whose numbers should not be used."""
    if not summary["completed"]:
        raise TriptychError("every request failed")
    if speaks and not summary["completed_with_audio"]:
        raise TriptychError("audio was asked for, and no reply had any")
    if fail_on_error and summary["failed"]:
        raise TriptychError(f"{summary['failed']} requests failed")
