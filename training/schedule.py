"""Learning rate by step, batches of examples of about one length, and the precision of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
_POOL = 8  # batches drawn together, then cut by length


def cosine(step: int, steps: int, peak: float, *, warm_up: int = 50, final_share: float = 0.05) -> float:
    """Linear warm-up to `peak`, then a cosine down to `final_share` of it at step `steps`."""
    done = min(1.0, step / steps)
    fall = final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * done))
    return peak * min(1.0, (step + 1) / warm_up) * fall


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step of all parameters be of this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def half_precision() -> torch.autocast:
    """bfloat16 products, where the processor has them: weights, sums of losses and the optimizer stay float32.

    oneDNN also offers them where it has to emulate them: there a step took 1.7 times that of float32.
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.autocast("cpu", torch.bfloat16, enabled=native)


def step_generator(seed: int, step: int) -> np.random.Generator:
    """Random numbers as a function of the step alone: a resumed run draws what the first would have."""
    return np.random.default_rng((seed, step))


def pooled_batch(
    step: int, seed: int, size: int, draw: Callable[[np.random.Generator], T], length: Callable[[T], int]
) -> list[T]:
    """The batch of a step: eight batches are drawn at once and sorted, so that little of a batch is padding.

    A function of the step alone. Costs eight times the drawing; drawing is cheap.
    """
    rng = step_generator(seed, step // _POOL)
    pool = sorted((draw(rng) for _ in range(size * _POOL)), key=length)
    order = rng.permutation(_POOL)
    start = int(order[step % _POOL]) * size
    return pool[start : start + size]
