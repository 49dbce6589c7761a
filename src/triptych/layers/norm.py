"""Root-mean-square normalisation (Zhang and Sennrich 2019; HF `Qwen3OmniMoeTextRMSNorm`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 whatever the dtype of x.

    `prepare` must be called once the weight is loaded.
    """

    scaled: Tensor  # plain attributes, not buffers: they are read at every step

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.size, self.eps = size, eps

    def prepare(self) -> None:
        """Fold the constants of the formula."""
        self.scaled = scaled_weight(self.weight)
        self.floor = self.eps * self.size

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scaled, self.floor)


def scaled_weight(weight: Tensor) -> Tensor:
    """What `rms_norm` takes for a weight [..., n]: times sqrt(n) in float32, as it is in narrower dtypes."""
    return weight * math.sqrt(weight.shape[-1]) if weight.dtype is torch.float32 else weight


def rms_norm(x: Tensor, scaled: Tensor, floor: float) -> Tensor:
    """x / sqrt(|x|^2 + n * eps) * sqrt(n) * weight: the formula with n cancelled. `floor` is n * eps.

    Half the time of the textbook order of operations on a CPU, and after the reduction only operations that IEEE
    rounds exactly, so that vector and scalar code give the same bits.
    """
    if x.dtype is torch.float32:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(norm.mul_(norm).add_(floor).sqrt_()).mul_(scaled)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    # HF rounds to the narrow dtype before it multiplies by the weight.
    unit = wide.div(norm.mul_(norm).add_(floor).sqrt_()).mul_(math.sqrt(x.shape[-1])).to(x.dtype)
    return unit * scaled
