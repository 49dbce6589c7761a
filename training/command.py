"""The command line of a trainer: where it works, how many steps it makes, and how large."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch


def run_trainer(description: str | None, train: Callable[..., None], steps: int, rate: float | None = None) -> None:
    """Read `--work`, `--steps` and, of a trainer that has one, `--rate`, and train with one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    if rate is not None:
        parser.add_argument("--rate", type=float, default=rate, help="the learning rate at its peak")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(**vars(arguments))
