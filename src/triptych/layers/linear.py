"""Dense layers, and the rule that makes their rows independent of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.product import take_product

# Matrix products of one to three rows take other kernels (dot products, matrix-vector) than those of four and more,
# and sum in another order. A batch-invariant engine pads every batch to whole tiles of this many rows, so a row's bits
# are the same alone and in any batch; tests/engine/test_batch_invariance.py holds this on the machine at hand.
ROW_TILE = 4


def padded_rows(rows: int, tile: int) -> int:
    """The next multiple of `tile`."""
    return -(-rows // tile) * tile


class GatedMLP(nn.Module):
    """Adds down(silu(gate(x)) * up(x)) to a residual, gate and up as one product (HF `Qwen3OmniMoeMLP`).

    `prepare` must be called once the weights are loaded.
    """

    projections = ("gate_up", "down")

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.width = intermediate
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(hidden, intermediate), requires_grad=False)

    def prepare(self) -> None:
        self.into, self.back = take_product(self, "gate_up"), take_product(self, "down")

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual and x [N, hidden] -> [N, hidden]."""
        return self.back.add(residual, self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """x [N, hidden] -> [N, intermediate], what the last product takes."""
        both = self.into(x)
        return F.silu(both[:, : self.width]).mul_(both[:, self.width :])
