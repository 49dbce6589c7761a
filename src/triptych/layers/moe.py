"""Mixture of experts (HF `Qwen3OmniMoe*TextSparseMoeBlock`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.grouped_product import make_grouped_product
from triptych.layers.linear import ROW_TILE, GatedMLP
from triptych.layers.product import give_up, held_weight, make_product, take_product

_LANES = 16  # elements of the widest vector register, float32


class SparseMoE(nn.Module):
    """A router, `num_experts` gated MLPs of which each row uses the `top_k` likeliest, and an optional shared one.

    Rows are sorted by expert, each expert's group padded to whole tiles of `row_tile` rows so that a row's result does
    not depend on how many others chose the same expert. `prepare` must be called once the weights are loaded.
    """

    projections = ("gate_up", "down")

    def __init__(
        self,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        intermediate: int,
        norm_topk_prob: bool,
        shared_intermediate: int = 0,
    ) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.norm_topk_prob = top_k, num_experts, norm_topk_prob
        self.width = intermediate
        self.row_tile = ROW_TILE
        self.router = nn.Parameter(torch.empty(num_experts, hidden), requires_grad=False)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_experts, hidden, intermediate), requires_grad=False)
        self.shared = GatedMLP(hidden, shared_intermediate) if shared_intermediate else None
        if self.shared is not None:
            self.shared_gate = nn.Parameter(torch.empty(1, hidden), requires_grad=False)

    def prepare(self, row_tile: int = ROW_TILE) -> None:
        """`row_tile` 1 gives up batch invariance for less padding."""
        self.row_tile = row_tile
        # On a CPU the routing is at hand, and one product per chosen expert costs half of what grouped products do.
        if self.router.device.type == "cpu":
            self.prepare_single()
        else:
            self.prepare_grouped()
        self.route = take_product(self, "router")
        if self.shared is not None:
            self.shared.prepare()
            self.gate_shared = take_product(self, "shared_gate")

    def prepare_single(self) -> None:
        """Lay out each expert for itself; the stacked weights are given up."""
        gate_up, down = held_weight(self, "gate_up"), held_weight(self, "down")
        self.experts = [
            (make_product(gate_up[expert]), make_product(down[expert])) for expert in range(self.num_experts)
        ]
        for name in self.projections:
            give_up(self, name)
        self.add_experts = self.add_experts_singly

    def prepare_grouped(self) -> None:
        """Keep the experts stacked, for grouped products."""
        self.into = make_grouped_product(held_weight(self, "gate_up"), self.row_tile)
        self.back = make_grouped_product(held_weight(self, "down"), self.row_tile)
        self.add_experts = self.add_experts_grouped

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual and x [N, hidden] -> [N, hidden], in the memory of `residual`; N is a multiple of `row_tile`."""
        probabilities = torch.softmax(self.route(x), dim=-1, dtype=torch.float)
        weights, experts = torch.topk(probabilities, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.add_experts(residual, x, experts, weights.to(x.dtype))
        if self.shared is not None:
            # Widened first: a sigmoid over one column would mix vector and scalar code, which round differently.
            gate = self.gate_shared(x).expand(-1, _LANES).contiguous()
            shared = self.shared.back(self.shared.inner(x))
            out = out.addcmul_(gate.sigmoid_()[:, :1], shared)
        return out

    def add_experts_singly(self, residual: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Add to residual [N, hidden] the experts [N, top_k] of each row by their weights, an expert at a time."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        tokens, scale = order // self.top_k, weights.flatten()[order].unsqueeze(1)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.num_experts).tolist()):
            if not count:
                continue
            into, back = self.experts[expert]
            rows = tokens[start : start + count]
            padding = -count % self.row_tile
            both = into(x[torch.cat((rows, rows[:1].expand(padding))) if padding else rows])
            result = back(F.silu(both[:, : self.width]).mul_(both[:, self.width :]))
            residual.index_add_(0, rows, result[:count].mul_(scale[start : start + count]))
            start += count
        return residual

    def add_experts_grouped(self, residual: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The same as grouped products, without knowing the routing on the host."""
        pairs, tile = experts.numel(), self.row_tile
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.long, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        tiled = (counts + (tile - 1)).div_(tile, rounding_mode="floor").mul_(tile)
        ends = tiled.cumsum(0)
        # Row r of the sorted pairs goes to: the start of its group plus its rank in it.
        shift = (ends - tiled) - (counts.cumsum(0) - counts)
        place = torch.arange(pairs, device=x.device) + shift[flat[order]]
        token = order // self.top_k
        # The bound holds for any routing, so shapes depend on N alone.
        rows = pairs + min(self.num_experts, pairs) * (tile - 1)
        grouped = x.new_zeros(rows, x.shape[1])
        grouped[place] = x[token]
        offsets = ends.to(torch.int32)
        gate, up = self.into(grouped, offsets).chunk(2, dim=-1)
        result = self.back(F.silu(gate).mul_(up), offsets)
        return residual.index_add_(0, token, result[place].mul_(weights.flatten()[order].unsqueeze(1)))
