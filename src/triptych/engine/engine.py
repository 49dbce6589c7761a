"""One step of an autoregressive engine: schedule, run, account, draw."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.model_runner import ModelRunner
from triptych.engine.request import EngineRequest
from triptych.engine.scheduler import Scheduler
from triptych.engine.step_cost import StepCost
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.stage_times import StageTimes
from triptych.telemetry.work import Work

# Takes the rows that sample and their hidden states [padded, hidden]; draws a token for each, and tells the engine.
Draw = Callable[[tuple[ScheduledRow, ...], Tensor], None]


class Engine:
    """A scheduler and a runner. `counts` has the steps that ran something, and the time of requests by `clock`.

    `work` says what the model has to do in a step.
    With a `cost`, which then learns from every step, prefills are cut so that no decode row beside them becomes late by
    its request's `due_at`. Without one they take the whole token budget.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counts: StageCounts,
        work: Callable[[ScheduledBatch], Work],
        clock: Callable[[], float] = time.perf_counter,
        cost: StepCost | None = None,
    ) -> None:
        self.scheduler, self.runner, self.counts, self.work, self.clock = scheduler, runner, counts, work, clock
        self.cost = cost

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    @torch.inference_mode()
    def step(self, draw: Draw) -> ScheduledBatch | None:
        """Run what the scheduler gives out, if anything, and `draw` from what has reached its end. Returns what ran."""
        started = self.clock()
        batch = self.scheduler.schedule(partial(self.cost.prefill_rows, started) if self.cost is not None else None)
        if batch is None:
            return None
        for request in batch.admitted:
            request.started_at = started
            self.counts.queue_wait_s.observe(started - request.ready_at)
        sampling, hidden = self.runner.execute(batch)
        self.scheduler.update(batch)
        if hidden is not None:
            draw(sampling, hidden)
        seconds = self.clock() - started
        if self.cost is not None:
            self.cost.observe(batch, seconds)
        self.counts.step_time_s.observe(seconds)
        self.counts.batch_size.observe(len(batch.rows))
        self.counts.step_tokens.observe(batch.num_tokens)
        self.counts.worked(self.work(batch))
        return batch

    def ready(self, request: EngineRequest) -> None:
        """A request that has not begun has from now on what it needs to, or more of it."""
        request.ready_at = self.clock()

    def sampled(self, request: EngineRequest) -> None:
        """The request has drawn a token."""
        if request.first_at is None:
            request.first_at = self.clock()
        self.scheduler.sampled(request)

    def times(self, request: EngineRequest) -> StageTimes:
        """For a message about the request that is sent now."""
        started = request.started_at
        # What comes for a request that has begun makes it ready anew.
        ready = request.ready_at if started is None else min(request.ready_at, started)
        return StageTimes.until(self.clock(), ready=ready, started=started, first=request.first_at)

    def finished(self, request: EngineRequest) -> None:
        """Count a request that was served to its end; one may end without a single step."""
        now = self.clock()
        self.counts.gen_time_s.observe(now - (now if request.started_at is None else request.started_at))
