"""One step of an autoregressive engine: schedule, run, account, draw."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.model_runner import ModelRunner
from triptych.engine.scheduler import Scheduler

# Takes the rows that sample and their hidden states [padded, hidden]; draws a token for each, and tells the scheduler.
Draw = Callable[[tuple[ScheduledRow, ...], Tensor], None]


class Engine:
    """A scheduler and a runner. `num_steps` and `step_seconds` count the steps that ran something."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.num_steps = 0
        self.step_seconds = 0.0

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    @torch.inference_mode()
    def step(self, draw: Draw) -> ScheduledBatch | None:
        """Run what the scheduler gives out, if anything, and `draw` from what has reached its end. Returns what ran."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        sampling, hidden = self.runner.execute(batch)
        self.scheduler.update(batch)
        if hidden is not None:
            draw(sampling, hidden)
        self.num_steps += 1
        self.step_seconds += time.perf_counter() - started
        return batch
