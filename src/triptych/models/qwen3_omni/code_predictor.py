"""The code predictor: the residual codes of one frame, one codebook after the other, with a KV cache of its own.

HF `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.generate` as one loop: position 0 holds the Talker's
hidden state, position 1 the embedding of codebook 0, position k + 1 that of residual code k. Each step runs only the
new position; the cache lives for one frame.

On a CPU the loop has a twin in C, which takes a tenth of the time for one stream. The two round differently, so a stage
runs one or the other for all its frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.decoder import DecoderLayer
from triptych.layers.linear import padded_rows
from triptych.layers.norm import RMSNorm
from triptych.layers.product import make_product
from triptych.layers.rotary import Rotary
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.backbone import build_layer, layer_placements, prepared_layers
from triptych.models.qwen3_omni.compiled_frame import CompiledFrame, Drawing, compiled_code
from triptych.models.qwen3_omni.config import DecoderConfig


class Draw(Drawing, Protocol):
    """Draws the residual codes of n frames."""

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        """logits [n, vocab] of residual `index` (from 0) -> codes [n]."""


class PositionAttention:
    """Attention of one position of one layer over itself and the positions before it."""

    def __init__(self, cache: Tensor, position: int, heads: int) -> None:
        batch, both, _, dim = cache.shape
        kv_heads = both // 2
        keys, values = cache[:, :kv_heads], cache[:, kv_heads:]
        self.key, self.value = keys[:, :, position], values[:, :, position]
        self.keys, self.values = keys[:, :, : position + 1], values[:, :, : position + 1]
        # The query heads of one key head stand on the query axis: no mask is needed for a single position.
        self.grouped = (batch, kv_heads, heads // kv_heads, dim)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, D], k and v [B, kv_heads, D] -> [B, kv_heads, heads / kv_heads, D]."""
        self.key.copy_(k)
        self.value.copy_(v)
        return F.scaled_dot_product_attention(q.view(self.grouped), self.keys, self.values)


class PairAttention:
    """Attention of the first two positions of one layer, which are computed together."""

    def __init__(self, cache: Tensor) -> None:
        kv_heads = cache.shape[1] // 2
        self.keys, self.values = cache[:, :kv_heads, :2], cache[:, kv_heads:, :2]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * 2, heads, D], k and v [B * 2, kv_heads, D] -> [B * 2, heads, D]."""
        _, heads, dim = q.shape
        self.keys.copy_(k.view(-1, 2, k.shape[1], dim).transpose(1, 2))
        self.values.copy_(v.view(-1, 2, v.shape[1], dim).transpose(1, 2))
        queries = q.view(-1, 2, heads, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, self.keys, self.values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, heads, dim)


class FrameCache:
    """Keys and values of one frame, [layers, B, 2 * kv_heads, positions, head_dim], with every view of them made.

    A frame overwrites the last one's; position p only ever reads positions up to p, so nothing needs clearing.
    `attends[p][layer]` attends for position p; those of position 1 take positions 0 and 1 together.
    """

    def __init__(self, config: DecoderConfig, batch: int, positions: int, like: Tensor) -> None:
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        self.memory = like.new_zeros(config.num_hidden_layers, batch, 2 * kv_heads, positions, dim)
        layers = self.memory.unbind(0)
        self.attends: list[list[PairAttention | PositionAttention]] = [[], [PairAttention(layer) for layer in layers]]
        for position in range(2, positions):
            self.attends.append([PositionAttention(layer, position, config.num_attention_heads) for layer in layers])


class CodePredictor(nn.Module):
    """Draws `num_code_groups - 1` residual codes. `tables` [groups - 1, vocab, hidden] are their embeddings."""

    def __init__(self, config: DecoderConfig, num_code_groups: int) -> None:
        super().__init__()
        self.config, self.residuals = config, num_code_groups - 1
        shape = (self.residuals, config.vocab_size, config.hidden_size)
        self.tables = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.heads = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.layers = nn.ModuleList(build_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def placements(self, layout: Layout) -> Iterator[Placement]:
        theirs, shape = "talker.code_predictor", (self.config.vocab_size, self.config.hidden_size)
        for index in range(self.residuals):
            yield Placement(
                f"{theirs}.model.codec_embedding.{index}.weight", "code_predictor.tables", shape, index=index
            )
            yield Placement(f"{theirs}.lm_head.{index}.weight", "code_predictor.heads", shape, index=index)
        yield from layer_placements(self.config, f"{theirs}.model", "code_predictor", layout)

    def prepare(self, row_tile: int, *, eager: bool = True) -> None:
        """Derived weights, and the rotary angles of every position a frame can have.

        Not `eager`: for the compiled loop, where it can be compiled.
        """
        self.row_tile = row_tile
        device, dtype = self.norm.weight.device, self.norm.weight.dtype
        rotary = Rotary(self.config.head_dim, self.config.rope_theta, None, device)
        cos, sin = rotary(torch.arange(self.residuals + 1, device=device).expand(3, -1), torch.float32)
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        code = None if eager else compiled_code()
        self.compiled: CompiledFrame | None = None
        if code is not None:
            self.compiled = CompiledFrame(
                code, self.config, layers=layers, norm=self.norm, heads=self.heads, cos=cos, signed_sin=sin
            )
            self.layers = nn.ModuleList()  # their weights are laid out anew
        else:
            self.norm.prepare()
            self.steps = prepared_layers(self.layers, row_tile)
            self.angles = list(zip(torch.split(cos.to(dtype), 1), torch.split(sin.to(dtype), 1), strict=True))
            self.draws = [make_product(head) for head in self.heads.data]
            self.caches: dict[int, FrameCache] = {}
        self.heads = nn.Parameter(self.heads.new_empty(0), requires_grad=False)
        self.use_tables(self.tables)

    def use_tables(self, tables: Tensor) -> None:
        """Embed from `tables`, equal to the loaded ones, whose memory is given up if it is not the same."""
        self.tables = nn.Parameter(tables, requires_grad=False)
        if self.compiled is not None:
            self.compiled.use_tables(self.tables)
        else:
            self.embeddings = list(self.tables)

    def forward(self, hidden: Tensor, first: Tensor, draw: Draw) -> Tensor:
        """The codes [n, residuals] that `draw` draws for n frames.

        hidden [n or more, hidden] are the Talker's hidden states, whose padding is passed over, and first [n, hidden]
        the embeddings of codebook 0.
        """
        hidden = hidden[: first.shape[0]]
        return self.draw_eagerly(hidden, first, draw) if self.compiled is None else self.compiled(hidden, first, draw)

    def draw_eagerly(self, hidden: Tensor, first: Tensor, draw: Draw) -> Tensor:
        """The loop as PyTorch's operations, over whole tiles of rows."""
        count, width = hidden.shape
        batch = padded_rows(count, self.row_tile)
        cache = self.caches.get(batch)
        if cache is None:
            cache = self.caches[batch] = FrameCache(self.config, batch, self.residuals + 1, hidden)
        x = torch.stack((_padded(hidden, batch), _padded(first, batch)), dim=1).view(2 * batch, width)
        (cos_0, sin_0), (cos_1, sin_1) = self.angles[:2]
        cos, sin = torch.cat((cos_0, cos_1)).repeat(batch, 1, 1), torch.cat((sin_0, sin_1)).repeat(batch, 1, 1)
        codes: list[Tensor] = []
        for index, head in enumerate(self.draws):
            if index:
                x = F.embedding(_padded(codes[-1], batch), self.embeddings[index - 1])
                cos, sin = self.angles[index + 1]
            for step, attend in zip(self.steps, cache.attends[index + 1], strict=True):
                x = step(x, cos, sin, attend)
            last = x if index else x.view(batch, 2, width)[:, 1]
            codes.append(draw(head(self.norm.forward(last)).float()[:count], index))
        return torch.stack(codes, dim=1)


def _padded(rows: Tensor, count: int) -> Tensor:
    """`count` rows: the first is repeated behind `rows`, and so is what it drew."""
    missing = count - rows.shape[0]
    return torch.cat((rows, rows[:1].expand(missing, *rows.shape[1:]))) if missing else rows
