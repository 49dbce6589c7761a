"""How the residual codes of the frames of one step are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.engine.draw import draw_top
from triptych.models.qwen3_omni.talker import RESIDUAL_TOP_K, RESIDUAL_TOP_P


class ResidualDraw:
    """uniforms float64 [n, residuals] in [0, 1). The code predictor is greedy exactly when its request's Talker is."""

    top_k, top_p = RESIDUAL_TOP_K, RESIDUAL_TOP_P

    def __init__(self, uniforms: Tensor, greedy: Sequence[bool]) -> None:
        self.uniforms, self.greedy = uniforms, torch.tensor(greedy, device=uniforms.device)
        self._all_greedy, self._some_greedy = all(greedy), any(greedy)

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """logits [n, vocab] of residual `index` -> codes [n]."""
        if self._all_greedy:
            return logits.argmax(dim=-1)
        codes = draw_top(logits, self.uniforms[:, index], temperature=1.0, top_k=self.top_k, top_p=self.top_p)
        return torch.where(self.greedy, logits.argmax(dim=-1), codes) if self._some_greedy else codes
