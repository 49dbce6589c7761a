"""Rotary position embedding (Su et al. 2021), with the interleaved three-axis form of Qwen3-Omni (M-RoPE).

HF: `Qwen3OmniMoeThinkerTextRotaryEmbedding` and `apply_rotary_pos_emb`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Angles of one decoder. `mrope_section` None is plain RoPE on the first axis of the positions."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        mrope_section: tuple[int, int, int] | None,
        device: torch.device | str = "cpu",
    ) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        self.inv_freq = (1.0 / theta**exponent).to(device)
        axis = torch.zeros(head_dim // 2, dtype=torch.long)
        if mrope_section is not None:
            # Frequencies go T H W T H W ... for as long as a section lasts, then T.
            axis[1 : mrope_section[1] * 3 : 3] = 1
            axis[2 : mrope_section[2] * 3 : 3] = 2
        self.axis = axis.to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [3, N] -> cos and signed sin, each [N, 1, head_dim], for `rotate`."""
        angles = positions.float()[self.axis].t() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
        )


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x [N, heads, head_dim] turned by its angles: x * cos + rotate_half(x) * sin, the sign kept in `signed_sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)
