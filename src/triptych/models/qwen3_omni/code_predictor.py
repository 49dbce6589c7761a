"""The code predictor: the residual codes of one frame, one codebook after the other, with a KV cache of its own.

HF `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.generate` as one loop: position 0 holds the Talker's
hidden state, position 1 the embedding of codebook 0, position k + 1 that of residual code k. Each step runs only the
new position; the cache lives for one frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.decoder import DecoderLayer
from triptych.layers.norm import RMSNorm
from triptych.layers.rotary import Rotary
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.backbone import build_layer, layer_placements
from triptych.models.qwen3_omni.config import DecoderConfig

Draw = Callable[[Tensor, int], Tensor]  # (logits [B, vocab], residual index 0..) -> codes [B]


class FrameAttention:
    """Causal attention of one layer over the positions of one frame, [B, 2 * kv_heads, positions, head_dim]."""

    def __init__(self, cache: Tensor, kv_heads: int) -> None:
        self.cache, self.kv_heads = cache, kv_heads
        self.filled = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * T, heads, D], k and v [B * T, kv_heads, D] of T new positions -> [B * T, heads, D]."""
        batch = self.cache.shape[0]
        new = q.shape[0] // batch
        rows, heads, dim = q.shape
        start, self.filled = self.filled, self.filled + new
        if new == 1:
            self.cache[:, : self.kv_heads, start] = k
            self.cache[:, self.kv_heads :, start] = v
            # The query heads of one key head stand on the query axis: no mask is needed for a single position.
            grouped = q.view(batch, self.kv_heads, heads // self.kv_heads, dim)
            seen = self.cache[:, :, : self.filled]
            out = F.scaled_dot_product_attention(grouped, seen[:, : self.kv_heads], seen[:, self.kv_heads :])
            return out.reshape(rows, heads, dim)
        kv = torch.cat((k, v), dim=1)
        self.cache[:, :, start : self.filled] = kv.view(batch, new, 2 * self.kv_heads, dim).transpose(1, 2)
        seen = self.cache[:, :, : self.filled]
        out = F.scaled_dot_product_attention(
            q.view(batch, new, heads, dim).transpose(1, 2),
            seen[:, : self.kv_heads],
            seen[:, self.kv_heads :],
            is_causal=True,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(rows, heads, dim)


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
        self.cos: list[Tensor] = []
        self.sin: list[Tensor] = []

    def placements(self, layout: Layout) -> Iterator[Placement]:
        theirs, shape = "talker.code_predictor", (self.config.vocab_size, self.config.hidden_size)
        for index in range(self.residuals):
            yield Placement(
                f"{theirs}.model.codec_embedding.{index}.weight", "code_predictor.tables", shape, index=index
            )
            yield Placement(f"{theirs}.lm_head.{index}.weight", "code_predictor.heads", shape, index=index)
        yield from layer_placements(self.config, f"{theirs}.model", "code_predictor", layout)

    def prepare(self) -> None:
        """Derived weights, and the rotary angles of every position a frame can have."""
        for layer in self._layers():
            layer.prepare()
        self.norm.prepare()
        device, dtype = self.norm.weight.device, self.norm.weight.dtype
        rotary = Rotary(self.config.head_dim, self.config.rope_theta, None, device)
        positions = torch.arange(self.residuals + 1, device=device).expand(3, -1)
        cos, sin = rotary(positions, dtype)
        self.cos, self.sin = list(torch.split(cos, 1)), list(torch.split(sin, 1))

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def forward(self, hidden: Tensor, first: Tensor, draw: Draw) -> Tensor:
        """hidden [B, hidden] of the Talker and first [B, hidden], the embedding of codebook 0 -> codes [B, residuals].

        `draw` samples each residual code. B is a multiple of ROW_TILE.
        """
        batch, width = hidden.shape
        config = self.config
        shape = (batch, 2 * config.num_key_value_heads, self.residuals + 1, config.head_dim)
        attends = [
            FrameAttention(torch.empty(shape, dtype=hidden.dtype, device=hidden.device), config.num_key_value_heads)
            for _ in range(config.num_hidden_layers)
        ]
        x = torch.stack((hidden, first), dim=1).view(2 * batch, width)
        cos = torch.cat((self.cos[0], self.cos[1])).repeat(batch, 1, 1)
        sin = torch.cat((self.sin[0], self.sin[1])).repeat(batch, 1, 1)
        codes = []
        for step in range(self.residuals):
            for layer, attend in zip(self._layers(), attends, strict=True):
                x = layer(x, cos, sin, attend)
            last = x.view(batch, -1, width)[:, -1] if step == 0 else x
            logits = F.linear(self.norm(last), self.heads[step])
            code = draw(logits.float(), step)
            codes.append(code)
            if step + 1 < self.residuals:
                x = F.embedding(code, self.tables[step])
                cos, sin = self.cos[step + 2], self.sin[step + 2]
        return torch.stack(codes, dim=1)
