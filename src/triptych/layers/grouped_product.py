"""Products of groups of rows with one weight of a stack for each group, without knowing the groups on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.layers.quantized_weight import QuantizedWeight


class GroupedProduct:
    """For a stack [E, N, K]."""

    def __init__(self, stack: Tensor) -> None:
        self.stack_t = stack.transpose(1, 2)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [M, K], group e its rows up to `ends[e]` (int32 [E]) -> [M, N]."""
        return F.grouped_mm(x, self.stack_t, offs=ends)


class WidenedGroupedProduct:
    """The same for a stack in eight bits: the weights of groups that have rows are widened in each call.

    `tile`: groups have multiples of so many rows.
    """

    def __init__(self, stack: QuantizedWeight, tile: int) -> None:
        self.stack, self.tile = stack, tile

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        stack, most = self.stack, x.shape[0] // self.tile
        if most < ends.shape[0]:
            # No more groups than this can have rows: those come first, in order, and what else is taken stays empty.
            empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            taken = empty.to(torch.int8).argsort(stable=True)[:most]
            stack, ends = stack[taken], ends[taken].cummax(0).values
        return F.grouped_mm(x, stack.widen().transpose(1, 2), offs=ends)


def make_grouped_product(stack: Tensor | QuantizedWeight, tile: int) -> GroupedProduct | WidenedGroupedProduct:
    """The product of a stack [E, N, K]."""
    return WidenedGroupedProduct(stack, tile) if isinstance(stack, QuantizedWeight) else GroupedProduct(stack)
