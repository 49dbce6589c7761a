"""The same load on the same model, with one more of the server's mechanisms switched on at each step.

A step is what it adds to a deploy config. `STEPS` is the whole list: a further one is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from triptych.bench.grid import NUMBERS, Grid, cells
from triptych.bench.measure import Measurement
from triptych.bench.metrics import summarise
from triptych.bench.report import watched
from triptych.bench.server import START_S, resolved_config, served
from triptych.bench.target import find_target
from triptych.errors import ConfigError, TriptychError

COLUMNS = ("output tok/s", "audio-s/s", "req/s", "mean TTFP, ms", "mean RTF")
LESS_IS_BETTER = ("mean TTFP, ms", "mean RTF")


StageKeys = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def every(**keys: Any) -> StageKeys:
    """The same keys in every stage."""
    return lambda stage: keys


def unchanged(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def one_replica(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"num_replicas": 1, "devices": stage["devices"].partition(",")[0]}


@dataclass(frozen=True, slots=True)
class Step:
    """Keys of a deploy file: `on` from this step on, `off` at the steps before it, as `stages` has for each stage.

    What none of them says is as in the deploy config that is measured.
    """

    name: str
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    stages: StageKeys = unchanged


STEPS = (
    Step("no batching"),
    Step("batching", stages=every(max_num_seqs=1)),
    Step("+ compiled steps", stages=every(enforce_eager=True)),
    Step("+ processes", stages=every(process="all")),
    Step("+ async chunk", on={"async_chunk": True}, off={"async_chunk": False}),
    Step("+ replicas", stages=one_replica),
)


@dataclass(frozen=True, slots=True)
class Rung:
    """A step on its way to a result: the deploy file to serve with, and the config that it resolves to."""

    name: str
    file: Path
    deploy: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RungResult:
    """`summaries` has one for each measurement."""

    rung: Rung
    start_up_s: float
    summaries: list[dict[str, Any]]

    def record(self, levels: Sequence[int]) -> dict[str, Any]:
        return {
            "step": self.rung.name,
            "deploy": self.rung.deploy,
            "start_up_s": self.start_up_s,
            "levels": [
                {"concurrency": level, **summary} for level, summary in zip(levels, self.summaries, strict=True)
            ],
        }


async def rungs(model: str, arguments: Sequence[str], folder: Path) -> tuple[list[Rung], list[str]]:
    """The steps, with a deploy file for each in `folder`, and the names of those left out since they change nothing.

    `arguments` of `triptych serve` say what is measured. Raises ConfigError if the server refuses them, or if every
    step is left out.
    """
    base = folder / "base.yaml"
    measured = await resolved_config(model, *arguments)
    base.write_text(yaml.safe_dump(measured), encoding="utf-8")
    found: list[Rung] = []
    left_out = []
    for number, step in enumerate(STEPS):
        file = _layers(base, number, measured)
        deploy = await resolved_config(model, "--deploy-config", str(file))
        if found and deploy == found[-1].deploy:
            left_out.append(step.name)
        else:
            found.append(Rung(step.name, file, deploy))
    if len(found) < 2:
        raise ConfigError(
            f"none of {', '.join(left_out)} changes anything: this deploy config leaves no room for them; measure one "
            "that does (docs/bench.md says what each step sets)"
        )
    return found, left_out


def _layers(base: Path, number: int, measured: Mapping[str, Any]) -> Path:
    """The deploy file of a step: one on top of the other, what each step of the ladder says at this one."""
    file = base
    for index, step in enumerate(STEPS):
        keys = dict(step.on if index <= number else step.off)
        if index > number:
            keys["stages"] = [{"stage_id": stage["stage_id"], **step.stages(stage)} for stage in measured["stages"]]
        if not keys:
            continue
        above = base.with_name(f"step{number}-{index}.yaml")
        above.write_text(yaml.safe_dump({"base_config": str(file), **keys}), encoding="utf-8")
        file = above
    return file


async def climb(model: str, rung: Rung, measurements: Sequence[Measurement], *, start_s: float = START_S) -> RungResult:
    """Start the server of a step and take every measurement.

    Raises TriptychError if the server does not start, ends by itself, or does not answer every request.
    """
    summaries = []
    async with served(model, "--deploy-config", str(rung.file), start_s=start_s) as server:
        target = await find_target(server.url, "/v1/chat/completions", None, None)
        for measurement in measurements:
            summary = summarise(await watched(measurement, target))
            if summary["failed"]:
                said = "; ".join(f"{reason}: {detail or '-'}" for reason, detail in summary["failure_examples"].items())
                raise TriptychError(f"{rung.name}: {summary['failed']} requests failed: {said}")
            summaries.append(summary)
    return RungResult(rung, server.start_up_s, summaries)


def grid(results: Sequence[RungResult], index: int) -> Grid:
    """A row for each step, of the measurement of that index; how many times better than the step before in brackets."""
    table = Grid(["step", *COLUMNS])
    before: Mapping[str, Any] | None = None
    for result in results:
        summary = result.summaries[index]
        row = cells(summary, COLUMNS)
        if before is not None:
            row = [f"{cell}{_gain(summary, before, column)}" for cell, column in zip(row, COLUMNS, strict=True)]
        table.rows.append([result.rung.name, *row])
        before = summary
    return table


def _gain(summary: Mapping[str, Any], before: Mapping[str, Any], column: str) -> str:
    name = NUMBERS[column][0]
    now, then = summary[name], before[name]
    if column in LESS_IS_BETTER:
        now, then = then, now
    return f" ({now / then:.2f}x)" if now and then else ""


def differences(below: Any, above: Any, path: str = "") -> list[str]:
    """What a config says that another one does not, as `stages[0].max_num_seqs: 1`."""
    if isinstance(below, dict) and isinstance(above, dict):
        keys = [(f"{path}.{key}" if path else key, below.get(key), above.get(key)) for key in below]
    elif isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        keys = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(below, above, strict=True))]
    else:
        return [] if below == above else [f"{path}: {str(below).lower() if isinstance(below, bool) else below}"]
    return [line for where, one, other in keys for line in differences(one, other, where)]


def markdown(results: Sequence[RungResult], levels: Sequence[int], *, title: str, about: Sequence[str]) -> str:
    """The record of a whole ladder; `about` says how and where it was taken, a paragraph each."""
    last = results[-1].rung
    lines = [f"# {title}", *about, "In brackets: how many times better than the step before."]
    for index, level in enumerate(levels):
        lines += [f"## Concurrency {level}", grid(results, index).markdown()]
    lines.append("## Steps")
    lines.append(f"`{last.name}` is the deploy config with everything on. The steps before differ from it in:")
    lines.append(
        "\n".join(f"- {r.rung.name}: `{'`, `'.join(differences(r.rung.deploy, last.deploy))}`" for r in results[:-1])
    )
    return "\n\n".join(lines) + "\n"
