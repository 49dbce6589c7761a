"""Options that the benchmark commands share, and what they make of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli.options import PlatformName
from triptych.errors import ConfigError, TriptychError

if TYPE_CHECKING:
    from triptych.bench.ceilings import Ceilings, Setting

RecordPath = Annotated[Path | None, typer.Option(help="Write a record in Markdown here.", dir_okay=False)]
ResultPath = Annotated[Path | None, typer.Option(help="Write all numbers here.", dir_okay=False)]
RequestTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")]
StartTimeout = Annotated[float, typer.Option(min=1, help="Seconds that a server may take to be ready.")]


def extra_fields(written: str | None) -> dict[str, Any]:
    """The JSON of `--extra-body`. Raises ConfigError for anything else, and for a field that bench sets itself."""
    import msgspec

    from triptych.bench.workload import OWN_FIELDS

    if written is None:
        return {}
    try:
        extra = msgspec.json.decode(written, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body is not a JSON object: {error}") from error
    if own := [name for name in OWN_FIELDS if name in extra]:
        raise ConfigError(f"--extra-body sets {', '.join(own)}, which bench sets itself")
    return extra


def serve_arguments(
    deploy_config: str | None, stage_overrides: str | None, platform: PlatformName | None
) -> tuple[str, ...]:
    """These options as `triptych serve` takes them."""
    given = {"--deploy-config": deploy_config, "--stage-overrides": stage_overrides, "--platform": platform}
    return tuple(word for flag, value in given.items() if value is not None for word in (flag, str(value)))


def check_results(record: Path | None, result_json: Path | None) -> None:
    """Raises ConfigError where a run could not be written down once it is over."""
    from triptych.bench.report import check_result_path

    if record is not None:
        check_result_path(record, "--record")
    if result_json is not None:
        check_result_path(result_json)


def check_once(option: str, values: Sequence[float]) -> None:
    """Raises ConfigError for a value that is given twice."""
    if len(set(values)) != len(values):
        raise ConfigError(f"{option} {', '.join(f'{value:g}' for value in values)}: each of them once")


async def measured_ceilings(settings: Iterable[Setting]) -> list[Ceilings]:
    """Those that can be measured here; why not, of the others: a run that is over is not lost for them."""
    from triptych.bench import ceilings

    found: list[Ceilings] = []
    for setting in dict.fromkeys(settings):
        typer.echo(f"measuring what this machine can do: {setting}", err=True)
        try:
            found += await ceilings.measure([setting])
        except TriptychError as error:
            typer.echo(f"no ceilings: {error}", err=True)
    return found


def command_line() -> str:
    """What was typed, for a record."""
    return shlex.join(["triptych", *sys.argv[1:]])
