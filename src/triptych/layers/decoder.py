"""One pre-norm transformer layer, shared by the Thinker, the Talker and the code predictor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from triptych.layers.attention import AttentionProjections
from triptych.layers.linear import GatedMLP
from triptych.layers.moe import SparseMoE
from triptych.layers.norm import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class BetweenLayers(Protocol):
    """What one step does to its rows between the layers of a decoder."""

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        """x [N, hidden] as layer `layer` (from 0) gave it -> as the next one takes it; may be in the same memory."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)) (HF `*TextDecoderLayer`). The caller owns the cache."""

    def __init__(
        self, *, attention: AttentionProjections, feed_forward: GatedMLP | SparseMoE, hidden: int, eps: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.input_norm = RMSNorm(hidden, eps)
        self.post_norm = RMSNorm(hidden, eps)

    def prepare(self, row_tile: int) -> None:
        """Derive what the layer keeps beside its weights; call once they are loaded."""
        self.attention.prepare()
        self.input_norm.prepare()
        self.post_norm.prepare()
        if isinstance(self.feed_forward, SparseMoE):
            self.feed_forward.prepare(row_tile)
        else:
            self.feed_forward.prepare()
        # Bound once: at small sizes nn.Module's calls and attributes cost as much as the arithmetic.
        attention = self.attention
        self.parts = (
            self.input_norm.forward,
            attention.project,
            attention.merge,
            self.post_norm.forward,
            self.feed_forward.forward,
        )

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        """x [N, hidden] -> [N, hidden]."""
        input_norm, project, merge, post_norm, feed_forward = self.parts
        q, k, v = project(input_norm(x), cos, signed_sin)
        x = merge(x, attend(q, k, v))
        return feed_forward(x, post_norm(x))
