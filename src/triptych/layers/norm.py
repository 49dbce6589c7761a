"""Root-mean-square normalisation (Zhang and Sennrich 2019; HF `Qwen3OmniMoeTextRMSNorm`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 whatever the dtype of x.

    `prepare` must be called once the weight is loaded.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.register_buffer("scaled", None, persistent=False)
        self.size, self.eps = size, eps
        self.scaled: Tensor

    def prepare(self) -> None:
        """Fold the constant of the formula into the weight."""
        self.scaled = self.weight.float() * math.sqrt(self.size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.scaled, self.eps)


def rms_norm(x: Tensor, weight: Tensor, scaled: Tensor, eps: float) -> Tensor:
    """`scaled` is weight * sqrt(n) in float32: x / sqrt(|x|^2 + n * eps) * scaled is the formula with n cancelled.

    Half the time of the textbook order of operations on a CPU, and after the reduction only operations that IEEE
    rounds exactly, so that vector and scalar code give the same bits.
    """
    size = x.shape[-1]
    if x.dtype is torch.float32:
        return x.div(_norm(x, eps * size)).mul_(scaled)
    wide = x.float()
    # HF rounds to the narrow dtype before it multiplies by the weight.
    return wide.div(_norm(wide, eps * size)).mul_(math.sqrt(size)).to(x.dtype) * weight


def _norm(x: Tensor, floor: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).add_(floor).sqrt_()
