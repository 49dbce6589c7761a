"""One pre-norm transformer layer, shared by the Thinker, the Talker and the code predictor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from triptych.layers.attention import AttentionProjections
from triptych.layers.linear import GatedMLP
from triptych.layers.moe import SparseMoE
from triptych.layers.norm import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def prepare(self) -> None:
        """Derive what the layer keeps beside its weights; call once they are loaded."""
        self.attention.prepare()
        self.input_norm.prepare()
        self.post_norm.prepare()

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        """x [N, hidden] -> [N, hidden]."""
        q, k, v = self.attention.project(self.input_norm(x), cos, signed_sin)
        x = self.attention.merge(x, attend(q, k, v))
        return self.feed_forward(x, self.post_norm(x))  # type: ignore[no-any-return]
