"""Code2Wav: codec frames to a 24 kHz waveform, one-shot or as exact streams.

Architecture and parameter names are those of `Qwen3OmniMoeCode2Wav` in transformers: embed and average the codebooks, a
windowed transformer, upsampling with ConvNeXt blocks, then a convolutional decoder with Snake activations. What mixes
time lives in `triptych.streaming`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.config import (
    CONVNEXT_EXPANSION,
    DILATIONS,
    KERNEL_SIZE,
    UPSAMPLE_TAPS,
    Code2WavConfig,
)
from triptych.streaming.attention import WindowedAttention, WindowGeometry, window_geometry
from triptych.streaming.conv import CausalConv1d, PointwiseConv1d, TransposedConv1d
from triptych.streaming.state import StreamChunk, StreamState


class Code2Wav(nn.Module):
    """The vocoder. Build it anywhere (the meta device too), load it, then call `prepare`.

    Raises CheckpointError when the config allows no streams: a first frame must give a sample, and the decoder's
    width must halve once per upsampling rate.
    """

    prefixes: tuple[str, ...] = ("code2wav.",)
    code_offset: Tensor
    inverse_frequencies: Tensor

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        if self.num_samples(1, first=True) < 1:
            raise CheckpointError(
                f"code2wav_config: upsampling_ratios {config.upsampling_ratios} and upsample_rates "
                f"{config.upsample_rates} leave no samples of a first frame"
            )
        if config.decoder_dim % 2 ** len(config.upsample_rates):
            raise CheckpointError(
                f"code2wav_config: decoder_dim {config.decoder_dim} cannot be halved {len(config.upsample_rates)} times"
            )
        hidden = config.hidden_size
        self.code_embedding = nn.Parameter(torch.empty(config.codebook_size * config.num_quantizers, hidden))
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.empty(hidden))
        self.upsample = nn.ModuleList(UpsampleBlock(hidden, factor) for factor in config.upsampling_ratios)
        self.conv_in = CausalConv1d(hidden, config.decoder_dim, KERNEL_SIZE)
        widths = [config.decoder_dim // 2**index for index in range(len(config.upsample_rates) + 1)]
        self.blocks = nn.ModuleList(
            DecoderBlock(width, half, rate)
            for width, half, rate in zip(widths[:-1], widths[1:], config.upsample_rates, strict=True)
        )
        self.snake_out = SnakeBeta(widths[-1])
        self.conv_out = CausalConv1d(widths[-1], 1, KERNEL_SIZE)
        self.requires_grad_(False)

    def num_samples(self, frames: int, *, first: bool) -> int:
        """Samples that a chunk of `frames` frames gives: fewer at a stream's start (or in a one-shot run) than later.

        With the published rates: 1920 * frames, less 555 once.
        """
        samples = frames
        for factor in self.config.upsampling_ratios:
            samples *= factor
        for rate in self.config.upsample_rates:
            samples = (samples - (UPSAMPLE_TAPS - 1 if first else 0)) * rate
        return samples

    def prepare(self) -> None:
        """Compute what the loaded weights imply once and for all. Call again when they change."""
        config, device = self.config, self.norm.device
        self.code_offset = torch.arange(config.num_quantizers, device=device)[:, None] * config.codebook_size
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        self.inverse_frequencies = 1.0 / config.rope_theta**exponents
        for module in self.modules():
            if isinstance(module, SnakeBeta | CausalConv1d | PointwiseConv1d | TransposedConv1d):
                module.prepare()

    def forward(
        self, codes: Tensor, state: StreamState | None = None, slots: Tensor | None = None, *, first: bool = True
    ) -> Tensor:
        """Decode int codes [B, num_quantizers, T] to float32 samples [B, num_samples(T, first=first)] in [-1, 1].

        Without `state` this is the one-shot run. With it, row b continues the stream in `slots[b]` (int64 [B]), or
        starts it when `first`; all rows of one call are first, or none is.
        """
        chunk = None
        if state is not None:
            if slots is None:
                raise ValueError("a streaming call needs the slot of each row")
            chunk = state.chunk(slots, first=first)
        x = F.embedding(codes + self.code_offset, self.code_embedding).mean(1)
        geometry = window_geometry(x, self.inverse_frequencies, self.config.sliding_window, chunk)
        for layer in self.layers:
            x = layer(x, geometry, chunk)
        x = _rms_norm(x, self.norm, self.config.rms_norm_eps).transpose(1, 2)
        for upsample in self.upsample:
            x = upsample(x, chunk)
        x = self.conv_in(x, chunk)
        for block in self.blocks:
            x = block(x, chunk)
        wav = _snake_conv(self.snake_out, self.conv_out, x, chunk)
        if chunk is not None:
            chunk.advance(codes.shape[-1])
        return wav[:, 0].float().clamp_(-1.0, 1.0)

    def placements(self, layout: Layout) -> Iterator[Placement]:
        """Where each tensor of the checkpoint goes. Vocoders have no experts, so the layout makes no difference."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        yield Placement("code2wav.code_embedding.weight", "code_embedding", shapes["code_embedding"])
        yield Placement("code2wav.pre_transformer.norm.weight", "norm", shapes["norm"])
        for index in range(len(self.layers)):
            yield from self._layer_placements(f"code2wav.pre_transformer.layers.{index}", f"layers.{index}", shapes)
        for index in range(len(self.upsample)):
            source, target = f"code2wav.upsample.{index}", f"upsample.{index}"
            yield from _placed(f"{source}.0.conv", f"{target}.conv", ("weight", "bias"), shapes)
            for name, ours in (("dwconv.conv", "depthwise"), ("norm", "norm"), ("pwconv1", "up"), ("pwconv2", "down")):
                yield from _placed(f"{source}.1.{name}", f"{target}.{ours}", ("weight", "bias"), shapes)
            yield Placement(f"{source}.1.gamma", f"{target}.gamma", shapes[f"{target}.gamma"])
        yield from _placed("code2wav.decoder.0.conv", "conv_in", ("weight", "bias"), shapes)
        for index in range(len(self.blocks)):
            source, target = f"code2wav.decoder.{index + 1}.block", f"blocks.{index}"
            yield from _placed(f"{source}.0", f"{target}.snake", ("alpha", "beta"), shapes)
            yield from _placed(f"{source}.1.conv", f"{target}.upsample", ("weight", "bias"), shapes)
            for unit in range(len(DILATIONS)):
                there, here = f"{source}.{unit + 2}", f"{target}.units.{unit}"
                for part in ("1", "2"):
                    yield from _placed(f"{there}.act{part}", f"{here}.snake{part}", ("alpha", "beta"), shapes)
                    yield from _placed(f"{there}.conv{part}.conv", f"{here}.conv{part}", ("weight", "bias"), shapes)
        last = len(self.blocks) + 1
        yield from _placed(f"code2wav.decoder.{last}", "snake_out", ("alpha", "beta"), shapes)
        yield from _placed(f"code2wav.decoder.{last + 1}.conv", "conv_out", ("weight", "bias"), shapes)

    def _layer_placements(self, source: str, target: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Placement]:
        config = self.config
        hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        start = 0
        for name, rows in (("q", query), ("k", key), ("v", key)):
            place = f"{target}.attention.qkv.weight"
            yield Placement(f"{source}.self_attn.{name}_proj.weight", place, (rows, hidden), start)
            start += rows
        yield Placement(f"{source}.self_attn.o_proj.weight", f"{target}.attention.out.weight", (hidden, query))
        for start, name in ((0, "gate"), (config.intermediate_size, "up")):
            place = f"{target}.gate_up.weight"
            yield Placement(f"{source}.mlp.{name}_proj.weight", place, (config.intermediate_size, hidden), start)
        for theirs, ours in (
            ("mlp.down_proj.weight", "down.weight"),
            ("input_layernorm.weight", "attention_norm"),
            ("post_attention_layernorm.weight", "mlp_norm"),
            ("self_attn_layer_scale.scale", "attention_scale"),
            ("mlp_layer_scale.scale", "mlp_scale"),
        ):
            yield Placement(f"{source}.{theirs}", f"{target}.{ours}", shapes[f"{target}.{ours}"])


class TransformerLayer(nn.Module):
    """Pre-norm attention and SwiGLU, each scaled per channel before it joins the residual stream."""

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention = WindowedAttention(
            hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.sliding_window
        )
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.attention_norm = nn.Parameter(torch.empty(hidden))
        self.mlp_norm = nn.Parameter(torch.empty(hidden))
        self.attention_scale = nn.Parameter(torch.empty(hidden))
        self.mlp_scale = nn.Parameter(torch.empty(hidden))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor, geometry: WindowGeometry, chunk: StreamChunk | None) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        mixed = self.attention(_rms_norm(x, self.attention_norm, self.eps), geometry, chunk)
        x = torch.addcmul(x, mixed, self.attention_scale)
        gate, up = self.gate_up(_rms_norm(x, self.mlp_norm, self.eps)).chunk(2, dim=-1)
        return torch.addcmul(x, self.down(F.silu(gate) * up), self.mlp_scale)


class UpsampleBlock(nn.Module):
    """A transposed convolution without overlap, then a causal ConvNeXt block (Liu et al., 2022)."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.conv = TransposedConv1d(channels, channels, factor, taps=1)
        self.depthwise = CausalConv1d(channels, channels, KERNEL_SIZE, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up = nn.Linear(channels, CONVNEXT_EXPANSION * channels)
        self.down = nn.Linear(CONVNEXT_EXPANSION * channels, channels)
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C, T] -> [B, C, T * factor]."""
        x = self.conv(x, chunk)
        mixed = self.norm(self.depthwise(x, chunk).transpose(1, 2))
        mixed = self.down(F.gelu(self.up(mixed)))
        return torch.addcmul(x, mixed.transpose(1, 2), self.gamma[:, None])


class DecoderBlock(nn.Module):
    """Snake, upsampling by `rate`, then residual units of growing dilation."""

    def __init__(self, in_channels: int, out_channels: int, rate: int) -> None:
        super().__init__()
        self.snake = SnakeBeta(in_channels)
        self.upsample = TransposedConv1d(in_channels, out_channels, rate, taps=UPSAMPLE_TAPS)
        self.units = nn.ModuleList(ResidualUnit(out_channels, dilation) for dilation in DILATIONS)

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C_in, T] -> [B, C_out, T * rate], less the trim at a stream's start."""
        x = self.upsample(self.snake(x), chunk)
        for unit in self.units:
            x = unit(x, chunk)
        return x


class ResidualUnit(nn.Module):
    """Snake, dilated convolution, Snake, pointwise convolution, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.snake1 = SnakeBeta(channels)
        self.conv1 = CausalConv1d(channels, channels, KERNEL_SIZE, dilation=dilation)
        self.snake2 = SnakeBeta(channels)
        self.conv2 = PointwiseConv1d(channels, channels)

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C, T] -> [B, C, T]. Adds to `x` in place."""
        hidden = self.snake2(_snake_conv(self.snake1, self.conv1, x, chunk))
        return self.conv2.accumulate(x, hidden)


class SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), with alpha and beta per channel (after Ziyin et al., 2020)."""

    frequency: Tensor
    inverse_magnitude: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def prepare(self) -> None:
        """Exponentiate alpha and beta once instead of at every step."""
        self.frequency = self.alpha.exp()[:, None]
        self.inverse_magnitude = (1.0 / (self.beta.exp() + 1e-9))[:, None]

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, C, T] -> [B, C, T], written into `out` where given."""
        wave = _sin_(x * self.frequency).square_()
        return torch.addcmul(x, wave, self.inverse_magnitude, out=out)


def _sin_(x: Tensor) -> Tensor:
    """Sine in place. NumPy's is 2.3 times faster than torch's on CPU (0.5 against 1.25 ns) and within 1e-7 of it."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        array = x.numpy()
        np.sin(array, out=array)
        return x
    return x.sin_()


def _snake_conv(snake: SnakeBeta, conv: CausalConv1d, x: Tensor, chunk: StreamChunk | None) -> Tensor:
    joined, latest = conv.join(x, chunk)
    snake(x, out=latest)
    return conv.convolve(joined, chunk)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _placed(
    source: str, target: str, names: tuple[str, ...], shapes: dict[str, tuple[int, ...]]
) -> Iterator[Placement]:
    for name in names:
        yield Placement(f"{source}.{name}", f"{target}.{name}", shapes[f"{target}.{name}"])
