"""How a run is shown: bars while it runs, a table at its end, a JSON file for programs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from triptych.bench import machine
from triptych.bench.ceilings import Ceilings
from triptych.bench.driver import Run
from triptych.bench.measure import Measurement
from triptych.bench.metrics import DISTRIBUTIONS, STATISTICS
from triptych.bench.outcome import Outcome
from triptych.bench.target import Target
from triptych.errors import ConfigError

TITLES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "itl_ms": "ITL, ms",
    "e2el_ms": "E2EL, ms",
    "audio_ttfp_ms": "audio TTFP, ms",
    "audio_after_text_ms": "audio after text, ms",
    "audio_rtf": "audio RTF",
    "audio_duration_s": "audio, s",
    "audio_underrun_s": "underrun, s",
    "audio_longest_gap_s": "longest gap, s",
}
_DIGITS = {"ms": 1, "s": 3, "rtf": 3}


class ProgressBar:
    """Called with each outcome. On a terminal, a bar on stderr; elsewhere nothing."""

    def __init__(self, count: int) -> None:
        console = Console(stderr=True)
        self._failed = 0
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=count)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, outcome: Outcome) -> None:
        self._failed += outcome.failure is not None
        self._bar.update(self._task, advance=1, description=f"{self._failed} failed" if self._failed else "")


def print_table(summary: Mapping[str, Any], *, title: str, speaks: bool, console: Console | None = None) -> None:
    """The numbers of `summarise`, for a reader."""
    console = console or Console(highlight=False)
    totals = Table(title=title, show_header=False, title_justify="left")
    totals.add_column(no_wrap=True)
    totals.add_column(justify="right")
    for name, value in _totals(summary, speaks):
        totals.add_row(name, value)
    console.print(totals)
    table = Table()
    table.add_column("per request", no_wrap=True)
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right")
    for name in DISTRIBUTIONS:
        if summary[f"mean_{name}"] is not None:
            values = [summary[f"{statistic}_{name}"] for statistic in STATISTICS]
            table.add_row(TITLES[name], *(f"{value:.{_DIGITS[name.rsplit('_', 1)[-1]]}f}" for value in values))
    if table.row_count:
        console.print(table)
    for reason, count in summary["failures"].items():
        console.print(f"failed: {count} x {reason}: {summary['failure_examples'][reason] or '-'}", markup=False)
    if speaks and summary["completed"] > summary["completed_with_audio"]:
        silent = summary["completed"] - summary["completed_with_audio"]
        console.print(f"{silent} replies had no audio; they are in no number about audio")
    if summary["output_tokens_counted_by"] in ("events", "mixed"):
        console.print("output tokens: pieces of text were counted, as the server sent no usage; it may have sent more")


def _totals(summary: Mapping[str, Any], speaks: bool) -> list[tuple[str, str]]:
    rows = [
        ("requests answered, failed", f"{summary['completed']}, {summary['failed']}"),
        ("duration, s", f"{summary['duration']:.2f}"),
        ("requests/s", f"{summary['request_throughput']:.2f}"),
        ("input tokens, output tokens", f"{summary['total_input_tokens']}, {summary['total_output_tokens']}"),
        ("output tok/s", f"{summary['output_throughput']:.1f}"),
    ]
    if speaks:
        rows += [
            ("replies with audio", str(summary["completed_with_audio"])),
            ("audio, s", f"{summary['total_audio_duration_s']:.1f}"),
            ("audio-s/s", f"{summary['audio_throughput']:.2f}"),
        ]
        if summary["streams_without_underrun_ratio"] is not None:
            share = f"{100 * summary['streams_without_underrun_ratio']:.0f} %"
            rows.append(("streams without underrun", f"{summary['streams_without_underrun']}, {share}"))
    if "request_goodput" in summary:
        rows.append(("good requests/s", f"{summary['request_goodput']:.2f}, {100 * summary['goodput_ratio']:.0f} %"))
    if summary["max_send_delay_ms"] >= 1:
        rows.append(("sent late by at most, ms", f"{summary['max_send_delay_ms']:.0f}"))
    return rows


async def watched(measurement: Measurement, target: Target, api_key: str | None = None) -> Run:
    """Take a measurement behind a progress bar. Raises TriptychError if every warm-up request fails."""
    with ProgressBar(measurement.num_prompts) as bar:
        return await measurement.take(target, api_key=api_key, on_end=bar)


def record(command: str, content: Mapping[str, Any], ceilings: Sequence[Ceilings] = ()) -> dict[str, Any]:
    """All that a result file holds: its content, and what it was measured on. Without `ceilings` none were measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        **content,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "ceilings": [msgspec.to_builtins(one) for one in ceilings],
    }


def check_result_path(path: Path, option: str = "--result-json") -> None:
    """Find out before the run whether its result has a file to go to. Raises ConfigError."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder; {option} cannot be written")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written")


def write_json(path: Path, result: Mapping[str, Any] | Sequence[Any]) -> None:
    """Raises ConfigError if the file cannot be written."""
    write_text(path, msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
