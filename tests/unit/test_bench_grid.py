"""Tables of benchmarks on consoles of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from triptych.bench.grid import Grid

GRID = Grid(["system", "audio-s/s", "mean TTFP, ms"], [["a server of many words", "1.50", "12"], ["b", "2.50", "9"]])


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    GRID.print("Measured", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_wide_console_has_a_line_for_each_row() -> None:
    assert any("a server of many words" in line and "1.50" in line and "12" in line for line in printed(80))


@pytest.mark.parametrize("width", [30, 40, 50])
def test_a_narrow_console_shows_every_number_as_well(width: int) -> None:
    lines = printed(width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for cell in ("Measured", "a server of many words", "audio-s/s", "1.50", "2.50", "mean TTFP, ms", "12", "9"):
        assert cell in text
