"""Training state on disk: written whole or not at all, so that a killed run goes on at the step it last saved."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Replace `path` by `state` in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_state(path: Path) -> dict[str, Any] | None:
    """The saved state, or None where there is none yet."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def seed_step(seed: int, step: int) -> None:
    """Make torch's and Python's global generators a function of the step: a resumed run draws what the first would."""
    torch.manual_seed(seed * 1_000_003 + step)
    random.seed(seed * 1_000_003 + step)


def save_step(
    path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, mean: AveragedModel | None = None
) -> None:
    """Save what `resume` takes up."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_state(path, state if mean is None else state | {"mean": mean.state_dict()})


def resume(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, mean: AveragedModel | None = None
) -> int:
    """Load what was saved; the step to go on from, or 0. A restored state has no part of the optimizer, nor a mean."""
    state = load_state(path)
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    if mean is not None and "mean" in state:
        mean.load_state_dict(state["mean"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def weights_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """What a stage has trained: the moving average of its weights where it keeps one."""
    if "mean" not in state:
        weights: dict[str, Tensor] = state["model"]
        return weights
    return {name.removeprefix("module."): part for name, part in state["mean"].items() if name != "n_averaged"}
