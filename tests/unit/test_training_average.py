"""Averages of trained states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.average import average
from training.checkpoints import save_state


def test_a_mean_is_weighted_and_whole_numbers_are_the_last_ones(tmp_path: Path) -> None:
    paths = [tmp_path / f"{step}.pt" for step in (1, 2)]
    for step, path in enumerate(paths, start=1):
        model = {"weight": torch.full((2,), float(step)), "count": torch.tensor(step)}
        save_state(path, {"step": step, "model": model, "optimizer": {}})
    mean = average([(paths[0], 0.25), (paths[1], 0.75)])
    assert mean["step"] == 2 and set(mean) == {"step", "model"}
    model = mean["model"]
    assert isinstance(model, dict)
    assert model["weight"].tolist() == [1.75, 1.75] and model["count"].item() == 2


def test_shares_must_sum_to_one_and_states_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the shares sum to 0\.5, not to 1"):
        average([(tmp_path / "a.pt", 0.5)])
    with pytest.raises(FileNotFoundError):
        average([(tmp_path / "a.pt", 1.0)])
