"""The training loop of an encoder that learns alone: eyes and ears."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from training.checkpoints import resume, save_step, seed_step
from training.log import TrainingLog
from training.schedule import cosine, set_rate, step_generator

PEAK_RATE = 2e-3
B = TypeVar("B")


def train_encoder(
    folder: Path,
    encoder: Any,
    steps: int,
    seed: int,
    draw: Callable[[random.Random], B],
    loss_of: Callable[[B], Tensor],
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Train to step `steps`, from the step last saved in `folder` on."""
    parameters = list(encoder.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step = resume(folder / "state.pt", encoder, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(seed, step)
        set_rate(optimizer, cosine(step, steps, PEAK_RATE, warm_up=50))
        batch = draw(random.Random(int(step_generator(seed, step).integers(2**62))))
        drawn = time.monotonic()
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        ended = time.monotonic()
        log.add(step, loss=loss.item(), gradient=norm.item(), drawing=drawn - started, seconds=ended - started)
        if step % 100 == 0 or step == steps:
            save_step(folder / "state.pt", step, encoder, optimizer)
        if step % 500 == 0 or step == steps:
            log.evaluated(step, **evaluate())
