"""The scripts behind the tables of docs/decisions run, and give a table of both sides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.layers.compiled import compiled

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("compiled_frame.py", ["--streams", "1", "3"], 2),
        ("compiled_layers.py", ["--streams", "2", "--context", "20", "--rows", "24"], 4),
        ("compiled_vocoder.py", ["--streams", "1", "--chunks", "1", "4"], 2),
    ],
)
def test_a_script_compares_the_two_sides(script: str, options: list[str], rows: int) -> None:
    if compiled(ROOT / "src/triptych/engine/draw.c") is None:
        pytest.skip("no C compiler: there is nothing to compare")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--model", "nano", "--repeats", "2", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + rows, done.stdout
    for line in table[2:]:
        ratio = float(line.split("|")[-2 if script == "compiled_layers.py" else -3])
        assert ratio > 0
