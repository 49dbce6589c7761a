"""Bar charts of a ladder as PNG files. matplotlib is an extra: `triptych[charts]`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.bench.grid import number
from triptych.errors import ConfigError

# File -> what it shows, the number of a summary, and whether the axis is logarithmic.
CHARTS = {
    "throughput": ("audio-seconds per second", "audio_throughput", False),
    "requests": ("requests per second", "request_throughput", False),
    "rtf": ("mean real-time factor", "mean_audio_rtf", False),
    "ttfp": ("mean time to first audio, ms", "mean_audio_ttfp_ms", True),
}


def check_charts(folder: Path) -> None:
    """Find out before the run whether there will be charts. Raises ConfigError naming the extra that is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--charts needs matplotlib: pip install 'triptych[charts]', or leave --charts out")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--charts {folder} is not a folder")


def draw(folder: Path, steps: Mapping[str, Sequence[Mapping[str, Any]]], levels: Sequence[int], title: str) -> None:
    """Write the charts: a group of bars for each step, a bar in it for each level of concurrency.

    `steps` is name -> summaries, in the order of `levels`. Raises ConfigError if the folder cannot be written.
    """
    from matplotlib.figure import Figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, (label, name, logarithmic) in CHARTS.items():
            figure = Figure(figsize=(1.6 * len(steps) + 2, 4), layout="constrained")
            axes = figure.subplots()
            width = 0.8 / len(levels)
            for index, level in enumerate(levels):
                values = [summaries[index][name] for summaries in steps.values()]
                at = [place + (index - (len(levels) - 1) / 2) * width for place in range(len(steps))]
                bars = axes.bar(at, [math.nan if v is None else v for v in values], width, label=f"concurrency {level}")
                axes.bar_label(bars, [number(v, 0 if v and v >= 100 else 2) for v in values], fontsize=8)
            axes.set_xticks(range(len(steps)), list(steps))
            axes.set_ylabel(label)
            axes.set_title(title, fontsize=10)
            if logarithmic:
                axes.set_yscale("log")
            axes.legend()
            figure.savefig(folder / f"{file}.png", dpi=150)
    except OSError as error:
        raise ConfigError(f"--charts {folder} cannot be written: {error.strerror or error}") from error
