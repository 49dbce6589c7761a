"""`triptych bench machine`: what this machine can do at most."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from typing import Annotated

import typer

from triptych.cli.bench_options import ResultPath
from triptych.cli.options import stoppable
from triptych.errors import ConfigError


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    dtype: Annotated[
        list[DType] | None,
        typer.Option(help="Of the products; may be given again. Default: float32 on a CPU, else bfloat16."),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="On a CPU; may be given again. [default: 1, and all cores]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU where there is one.")] = None,
    result_json: ResultPath = None,
) -> None:
    """Measure the ceilings of this machine: memory bandwidth, and products of matrices, in each dtype and thread count.

    They are what `bench serve` holds the stages of a server against. Nothing else should run meanwhile.
    """
    from triptych.bench import ceilings, machine, report
    from triptych.config.platform import detect_platform

    place = device or detect_platform()
    if place != "cpu" and place.partition(":")[0] != "cuda":
        raise ConfigError(f"--device {device!r} is not cpu, cuda or cuda:N")
    if place != "cpu" and threads:
        raise ConfigError(f"--threads is for a CPU, and the device is {place}; leave it out, or give --device cpu")
    if result_json is not None:
        report.check_result_path(result_json)
    counts = (threads or [1, len(os.sched_getaffinity(0))]) if place == "cpu" else [1]
    dtypes = dtype or [DType.float32 if place == "cpu" else DType.bfloat16]
    with stoppable():
        found = asyncio.run(ceilings.measure(ceilings.Setting(one, count, place) for one in dtypes for count in counts))
    ceilings.grid(found).print(machine.name())
    if result_json is not None:
        report.write_json(result_json, report.record("bench machine", {}, found))
