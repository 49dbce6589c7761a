"""Causal attention over a sliding window, streaming exactly. See `state` for the contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.streaming.state import StreamChunk, StreamingLayer, last_steps


@dataclass(frozen=True, slots=True)
class WindowGeometry:
    """What every layer of a stack shares for one chunk: rotations of its T positions, and who sees whom.

    `cos` and `sin` are [B, 1, T, D]; `visible` is bool [B, 1, T, S], S = history + T keys (history 0 on a first chunk).
    """

    cos: Tensor
    sin: Tensor
    visible: Tensor


def window_geometry(x: Tensor, inverse_frequencies: Tensor, window: int, chunk: StreamChunk | None) -> WindowGeometry:
    """Geometry for x [B, T, C]. Positions count frames since the stream's start, without an upper bound.

    A query at position p sees the keys at p - window + 1 .. p. A steady chunk has `window - 1` keys before its own; in
    a young stream the oldest of them lie before position 0 and are hidden.
    """
    batch, length, _ = x.shape
    device = x.device
    offset = torch.zeros(batch, dtype=torch.int64, device=device) if chunk is None else chunk.num_frames()
    history = 0 if chunk is None or chunk.first else window - 1
    positions = offset[:, None] + torch.arange(length, device=device)
    angles = positions[..., None].float() * inverse_frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    keys = torch.arange(-history, length, device=device)
    age = torch.arange(length, device=device)[:, None] - keys
    visible = ((age >= 0) & (age < window)) & (offset[:, None, None] + keys >= 0)
    return WindowGeometry(angles.cos().to(x.dtype), angles.sin().to(x.dtype), visible[:, None])


class WindowedAttention(StreamingLayer):
    """Multi-head attention with RoPE and fused q, k, v. Its history is the last `window - 1` rotated keys and values.

    A ring of exactly `window` entries would be exact one step at a time only: writing T steps first evicts T - 1 keys
    that the chunk's early queries still need. Hence join, attend, keep the tail, like a convolution.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.reach = window - 1
        self.history_shape = (num_kv_heads, 2, self.reach, head_dim)

    def forward(self, x: Tensor, geometry: WindowGeometry, chunk: StreamChunk | None) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = _rotate(heads[:, :num_rotated], geometry)
        query, key, value = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        if chunk is not None and self.reach:
            both = torch.stack([key, value], dim=2)
            history = chunk.history(self)
            both = both if history is None else torch.cat([history, both], dim=3)
            chunk.keep(self, last_steps(both, self.reach, 3))
            key, value = both.unbind(2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=geometry.visible, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def _rotate(x: Tensor, geometry: WindowGeometry) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * geometry.cos + torch.cat([-second, first], dim=-1) * geometry.sin
