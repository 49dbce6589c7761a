"""The command line of a trainer: where it works, and how many steps it makes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch


def run_trainer(description: str | None, train: Callable[[Path, int], None], steps: int) -> None:
    """Read `--work` and `--steps` (by default `steps`), and train with one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.work, arguments.steps)
