"""States of a training run: what is kept is the moving average, and a run that was stopped goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.checkpoints import load_state, resume, save_step, weights_of
from training.log import TrainingLog


class Run:
    def __init__(self, path: Path) -> None:
        self.path, self.model = path, nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.mean = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.step = resume(path, self.model, self.optimizer, self.mean)

    def to(self, step: int) -> None:
        """Each step adds one to the weight."""
        while self.step < step:
            self.optimizer.zero_grad()
            (-self.model.weight).sum().backward()
            self.optimizer.step()
            self.mean.update_parameters(self.model)
            self.step += 1
        save_step(self.path, self.step, self.model, self.optimizer, self.mean)


def test_a_stopped_run_goes_on_with_the_mean_of_its_weights(tmp_path: Path) -> None:
    Run(tmp_path / "a.pt").to(5)
    Run(tmp_path / "b.pt").to(2)
    Run(tmp_path / "b.pt").to(5)
    found = []
    for name in ("a.pt", "b.pt"):
        state = load_state(tmp_path / name)
        assert state is not None and state["model"]["weight"].item() == 5
        found.append(weights_of(state)["weight"].item())
    mean = 1.0
    for weight in range(2, 6):
        mean = 0.75 * mean + 0.25 * weight
    assert found == [mean, mean]


def test_without_a_mean_the_weights_are_those_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    save_step(tmp_path / "a.pt", 3, model, torch.optim.SGD(model.parameters()))
    state = load_state(tmp_path / "a.pt")
    assert state is not None and torch.equal(weights_of(state)["weight"], model.weight)
    run = Run(tmp_path / "none.pt")
    assert run.step == 0 and resume(tmp_path / "a.pt", model, torch.optim.SGD(model.parameters())) == 3


def test_a_line_of_the_log_has_means_over_the_steps_that_had_a_value(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log.jsonl", every=4)
    for step in range(1, 9):
        log.add(step, loss=float(step), **({"sound": 10.0 * step} if step % 3 == 0 else {}))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"step": 4, "loss": 2.5, "sound": 30.0}, {"step": 8, "loss": 6.5, "sound": 60.0}]
