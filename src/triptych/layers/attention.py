"""Attention over a paged KV cache, and the projections around it.

A step's rows are packed: first the decode rows (one per request), then the pieces of prefills. Decode rows go through
one padded call, each prefill piece through a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.norm import rms_norm, scaled_weight
from triptych.layers.product import take_product
from triptych.layers.rotary import rotate


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Rows [start, end) of the packed batch attend to the `context` first positions of their request.

    `blocks` [n] are the cache blocks that hold them; `mask` [end - start, n * block_size] is True where a row may look.
    """

    start: int
    end: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """Where this step's keys and values go, and what each row may look at.

    `slots` [N]: cache row for each packed row (padded rows: a row of the trash block). The first `num_decodes` rows are
    decode rows with `decode_blocks` [num_decodes * blocks_per_row] and `decode_mask` [num_decodes, 1, 1, L].
    """

    slots: Tensor
    num_decodes: int
    decode_blocks: Tensor
    decode_mask: Tensor
    pieces: tuple[PrefillPiece, ...]


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """The same for compiled layers, which take decode rows and prefill rows alike.

    `slots` [N] as above. Of the n rows that are not padding: row r is the last of the first `lengths[r]` positions of
    its request, whose cache blocks are `blocks[starts[r]]` and on; the rows of a request follow each other, in order.
    All int64. `longest` is the largest of `lengths`.
    """

    slots: Tensor
    blocks: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int


StepMetadata = PagedMetadata | RowMetadata


class PagedAttention:
    """The cache of one layer, [num_blocks, block_size, 2 * kv_heads, head_dim] (keys, then values), and its reads."""

    def __init__(self, cache: Tensor, kv_heads: int, metadata: PagedMetadata) -> None:
        self.cache, self.kv_heads, self.metadata = cache, kv_heads, metadata

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads, D]."""
        meta = self.metadata
        rows = self.cache.view(-1, *self.cache.shape[2:])
        rows.index_copy_(0, meta.slots, torch.cat((k, v), dim=1))
        if not meta.pieces:
            out = self._decode(q[: meta.num_decodes])
            # Padding repeats the first row here as well: it reads no keys, and chooses the same experts in every layer.
            padding = q.shape[0] - meta.num_decodes
            return torch.cat((out, out[:1].expand(padding, -1, -1))) if padding else out
        out = torch.zeros_like(q)  # padded rows stay zero
        if meta.num_decodes:
            out[: meta.num_decodes] = self._decode(q[: meta.num_decodes])
        for piece in meta.pieces:
            out[piece.start : piece.end] = self._prefill(q[piece.start : piece.end], piece)
        return out

    def _decode(self, q: Tensor) -> Tensor:
        batch, heads, dim = q.shape
        gathered = self.cache.index_select(0, self.metadata.decode_blocks)
        kv = gathered.view(batch, -1, 2 * self.kv_heads, dim).transpose(1, 2)
        # The query heads of one key head stand on the query axis: no copy of keys for grouped heads.
        grouped = q.view(batch, self.kv_heads, heads // self.kv_heads, dim)
        out = F.scaled_dot_product_attention(
            grouped, kv[:, : self.kv_heads], kv[:, self.kv_heads :], attn_mask=self.metadata.decode_mask
        )
        return out.reshape(batch, heads, dim)

    def _prefill(self, q: Tensor, piece: PrefillPiece) -> Tensor:
        gathered = self.cache.index_select(0, piece.blocks)
        kv = gathered.view(1, -1, 2 * self.kv_heads, q.shape[-1]).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            kv[:, : self.kv_heads],
            kv[:, self.kv_heads :],
            attn_mask=piece.mask,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)


class AttentionProjections(nn.Module):
    """q, k and v as one product, RMS-normalised per head and turned; and the output product (HF `*TextAttention`).

    `prepare` must be called once the weights are loaded.
    """

    projections = ("qkv", "out")

    def __init__(self, *, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.turning = heads + kv_heads
        self.floor = eps * head_dim
        self.qkv = nn.Parameter(torch.empty((heads + 2 * kv_heads) * head_dim, hidden), requires_grad=False)
        self.out = nn.Parameter(torch.empty(hidden, heads * head_dim), requires_grad=False)
        self.q_norm = nn.Parameter(torch.empty(head_dim), requires_grad=False)
        self.k_norm = nn.Parameter(torch.empty(head_dim), requires_grad=False)

    @property
    def head_norms(self) -> Tensor:
        """Norm weights of the query heads, then of the key heads, [heads + kv_heads, D]."""
        return torch.cat((self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1)))

    def prepare(self) -> None:
        """One norm weight for the query and key heads together: they are normalised and turned in one go."""
        self.qk_scaled = scaled_weight(self.head_norms)
        self.into, self.back = take_product(self, "qkv"), take_product(self, "out")

    def project(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, hidden] -> q [N, heads, D], k and v [N, kv_heads, D]."""
        turning, heads = self.turning, self.heads
        qkv = self.into(x).view(-1, turning + self.kv_heads, self.head_dim)
        qk = rotate(rms_norm(qkv[:, :turning], self.qk_scaled, self.floor), cos, signed_sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, turning:]

    def merge(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The output product of [N, heads, D], added to residual [N, hidden]."""
        return self.back.add(residual, attended.reshape(attended.shape[0], -1))
