"""A training log: means of every value, one JSON line each so many steps, in a file and on the terminal.

What was measured on held-out data has a file of its own beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean


class TrainingLog:
    def __init__(self, path: Path, every: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.every = path, every
        self._values: dict[str, list[float]] = {}

    def add(self, step: int, **values: float) -> None:
        """Values of one step; a line is written when `step` is a multiple of `every`.

        Each is a mean over the steps that had it.
        """
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
        if step % self.every:
            return
        means: dict[str, object] = {name: round(fmean(found), 5) for name, found in self._values.items()}
        _append(self.path, {"step": step, **means})
        self._values = {}

    def evaluated(self, step: int, **values: object) -> None:
        """What an evaluation has found, in `evaluation.jsonl`."""
        _append(self.path.with_name("evaluation.jsonl"), {"step": step, **values})


def _append(path: Path, values: dict[str, object]) -> None:
    line = json.dumps(values)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)
