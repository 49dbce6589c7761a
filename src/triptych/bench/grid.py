"""A table with a row for each run, for a terminal and for a record in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

# Column -> the number of a summary that it shows, and with how many digits.
NUMBERS: dict[str, tuple[str, int]] = {
    "output tok/s": ("output_throughput", 1),
    "audio-s/s": ("audio_throughput", 2),
    "req/s": ("request_throughput", 2),
    "mean TTFT, ms": ("mean_ttft_ms", 0),
    "mean TTFP, ms": ("mean_audio_ttfp_ms", 0),
    "mean RTF": ("mean_audio_rtf", 3),
}

_ANY_WIDTH = 10_000


def cells(summary: Mapping[str, Any], columns: Sequence[str] = tuple(NUMBERS)) -> list[str]:
    """The numbers of one run as text; a dash for what was not measured."""
    return [number(summary[NUMBERS[column][0]], NUMBERS[column][1]) for column in columns]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Grid:
    """The first column holds names, the others numbers."""

    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def print(self, title: str, console: Console | None = None) -> None:
        """As one table where the console is as wide as that, else as a list for each row."""
        console = console or Console(highlight=False)
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        if console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum <= console.width:
            console.print(table)
            return
        console.print(title)
        for name, *cells in self.rows:
            console.print(name, markup=False)
            one = Table(show_header=False)
            for column, cell in zip(self.columns[1:], cells, strict=True):
                one.add_row(column, cell)
            console.print(one)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
