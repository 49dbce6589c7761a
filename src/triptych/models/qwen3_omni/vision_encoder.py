"""The Thinker's eye: patches of pixels to rows. Names and arithmetic are those of HF `Qwen3OmniMoeVisionEncoder`.

Patches attend within their temporal patch, and their positions are those in height and width only: so a video may be
cut between any two temporal patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.segment_attention import segment_attention
from triptych.layers.unfilled import Conv3d, Embedding, Linear

Grid = tuple[int, int, int]  # patches over time, height and width


class VisionEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinker_config.vision_config`, with the defaults of transformers."""

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    rope_parameters: dict[str, str | float] = {}


class VisionEncoder(nn.Module):
    """Build it anywhere (the meta device too): what is in no checkpoint is computed on the host."""

    frequencies: Tensor

    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        if config.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; only 'gelu_pytorch_tanh' is")
        if config.rope_parameters.get("rope_type", "axial") != "axial":
            raise ValueError(f"rope_type {config.rope_parameters['rope_type']!r} is not supported; only 'axial' is")
        if config.hidden_size % (4 * config.num_heads):
            raise ValueError(f"hidden_size {config.hidden_size} is no multiple of 4 x num_heads {config.num_heads}")
        if any(not 0 <= layer < config.depth for layer in config.deepstack_visual_indexes):
            raise ValueError(f"deepstack_visual_indexes {config.deepstack_visual_indexes} exceed depth {config.depth}")
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, merge_first=False)
        self.merger_list = nn.ModuleList(PatchMerger(config, merge_first=True) for _ in config.deepstack_visual_indexes)
        side = config.hidden_size // config.num_heads // 2  # half of a head turns by height, half by width
        theta = float(config.rope_parameters.get("rope_theta", 10_000.0))
        frequencies = 1.0 / theta ** (torch.arange(0, side, 2, dtype=torch.float, device="cpu") / side)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Patches [sum of t * h * w, values] of pictures one after another -> rows [sum / merge^2, out_hidden_size] and
        as many for each DeepStack layer. Patches of one merged block stand next to each other."""
        x = self.patch_embed(patches)
        positions, angles = zip(*(self._positions(grid) for grid in grids), strict=True)
        x = x + torch.cat(positions).to(x.dtype)
        turned = torch.cat(angles)
        cos, sin = turned.cos().unsqueeze(1), turned.sin().unsqueeze(1)
        segments = [h * w for t, h, w in grids for _ in range(t)]
        deepstack: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, segments)
            if layer in self.config.deepstack_visual_indexes:
                deepstack[layer] = self.merger_list[self.config.deepstack_visual_indexes.index(layer)](x)
        return self.merger(x), tuple(deepstack[layer] for layer in sorted(deepstack))

    def _positions(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Learned positions [t * h * w, hidden] and rotary angles [t * h * w, head_dim] of a picture's patches."""
        t, h, w = grid
        merge, device = self.config.spatial_merge_size, self.frequencies.device
        cells = torch.arange(h * w, device=device).view(h // merge, merge, w // merge, merge).transpose(1, 2).flatten()
        rows, columns = cells // w, cells % w
        # The learned positions are those of a square, stretched to h x w, its corners on the picture's corners.
        side = int(self.config.num_position_embeddings**0.5)
        (top, bottom, down), (left, right, along) = _between(rows, h, side), _between(columns, w, side)
        indices = torch.stack((top * side + left, top * side + right, bottom * side + left, bottom * side + right), 1)
        weights = torch.stack(((1 - down) * (1 - along), (1 - down) * along, down * (1 - along), down * along), 1)
        learned = (self.pos_embed(indices) * weights.unsqueeze(2)).sum(1)
        turned = torch.cat((rows[:, None] * self.frequencies, columns[:, None] * self.frequencies), dim=1)
        return learned.repeat(t, 1), turned.repeat(t, 2)


class PatchEmbed(nn.Module):
    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """A convolution over whole patches is one product."""
        return F.linear(patches.to(self.proj.weight.dtype), self.proj.weight.flatten(1), self.proj.bias)


class VisionBlock(nn.Module):
    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config.hidden_size, config.num_heads)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Sequence[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k = (_rotate(part, cos, sin) for part in (q, k))
        out: Tensor = self.proj(segment_attention(q, k, v, segments))
        return out


class VisionMLP(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(width, intermediate)
        self.linear_fc2 = Linear(intermediate, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class PatchMerger(nn.Module):
    """merge x merge neighbouring patches -> one row; normalised before they are put together, or after."""

    def __init__(self, config: VisionEncoderConfig, *, merge_first: bool) -> None:
        super().__init__()
        self.merge_first = merge_first
        self.merged = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(self.merged if merge_first else config.hidden_size, eps=1e-6)
        self.mlp = nn.ModuleList(
            (Linear(self.merged, self.merged), nn.GELU(), Linear(self.merged, config.out_hidden_size))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_q(x.view(-1, self.merged) if self.merge_first else x).view(-1, self.merged)
        for layer in self.mlp:
            x = layer(x)
        return x


def _between(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two entries of a table of `side` that position `index` of `size` lies between, and how far along."""
    at = index.float() * (side - 1) / max(size - 1, 1)
    first = at.floor()
    return first.long(), (first.long() + 1).clamp(max=side - 1), at - first


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by angles [N, 1, D], in float32 whatever the dtype of x."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
