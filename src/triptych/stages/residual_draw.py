"""How the residual codes of the frames of one step are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from triptych.engine.draw import draw_top
from triptych.models.qwen3_omni.talker import RESIDUAL_TOP_K, RESIDUAL_TOP_P


class ResidualDraw:
    """uniforms float64 [n, residuals] in [0, 1). The code predictor is greedy exactly when its request's Talker is.

    `greedy` [n] says which frames are; what is known of all of them on the host spares work.
    """

    top_k, top_p = RESIDUAL_TOP_K, RESIDUAL_TOP_P

    def __init__(self, uniforms: Tensor, greedy: Tensor, *, all_greedy: bool = False, some_greedy: bool = True) -> None:
        self.uniforms, self.greedy = uniforms, greedy
        self._all_greedy, self._some_greedy = all_greedy, some_greedy

    @classmethod
    def of(cls, uniforms: Tensor, greedy: Sequence[bool]) -> Self:
        """With what the host knows of the requests."""
        known = torch.tensor(greedy, device=uniforms.device)
        return cls(uniforms, known, all_greedy=all(greedy), some_greedy=any(greedy))

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """logits [n, vocab] of residual `index` -> codes [n]."""
        if self._all_greedy:
            return logits.argmax(dim=-1)
        codes = draw_top(logits, self.uniforms[:, index], temperature=1.0, top_k=self.top_k, top_p=self.top_p)
        return torch.where(self.greedy, logits.argmax(dim=-1), codes) if self._some_greedy else codes
