"""Code2Wav: codec frames to a 24 kHz waveform, one-shot or as exact streams.

Architecture and parameter names are those of `Qwen3OmniMoeCode2Wav` in transformers: embed and average the codebooks, a
windowed transformer, upsampling with ConvNeXt blocks, then a convolutional decoder with Snake activations.

On a CPU all of it has a twin in C. The two round differently, so a stage runs one or the other for all its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.code2wav_layers import (
    DecoderBlock,
    SnakeBeta,
    TransformerLayer,
    UpsampleBlock,
    rms_norm,
    snake_conv,
)
from triptych.models.qwen3_omni.compiled_vocoder import CompiledVocoder, compiled_code
from triptych.models.qwen3_omni.config import DILATIONS, KERNEL_SIZE, UPSAMPLE_TAPS, Code2WavConfig
from triptych.streaming.attention import window_geometry
from triptych.streaming.conv import CausalConv1d, PointwiseConv1d, TransposedConv1d
from triptych.streaming.state import StreamState


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
        self.compiled: CompiledVocoder | None = None
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

    def prepare(self, *, eager: bool = True) -> None:
        """Compute what the loaded weights imply once and for all. Call again when they change.

        Not `eager`, which is for a CPU: for the compiled twin, where it can be compiled. It has the weights laid out
        anew, and those of the modules are given up.
        """
        config, device = self.config, self.norm.device
        self.code_offset = torch.arange(config.num_quantizers, device=device)[:, None] * config.codebook_size
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        self.inverse_frequencies = 1.0 / config.rope_theta**exponents
        code = None if eager else compiled_code()
        if code is not None:
            self.compiled = CompiledVocoder(code, self)
            self.layers, self.upsample, self.blocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
            del self.conv_in, self.snake_out, self.conv_out
            return
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
        if self.compiled is not None:
            return self.compiled.decode(codes, chunk, self.num_samples(codes.shape[-1], first=first))
        x = F.embedding(codes + self.code_offset, self.code_embedding).mean(1)
        geometry = window_geometry(x, self.inverse_frequencies, self.config.sliding_window, chunk)
        for layer in self.layers:
            x = layer(x, geometry, chunk)
        x = rms_norm(x, self.norm, self.config.rms_norm_eps).transpose(1, 2)
        for upsample in self.upsample:
            x = upsample(x, chunk)
        x = self.conv_in(x, chunk)
        for block in self.blocks:
            x = block(x, chunk)
        wav = snake_conv(self.snake_out, self.conv_out, x, chunk)
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


def _placed(
    source: str, target: str, names: tuple[str, ...], shapes: dict[str, tuple[int, ...]]
) -> Iterator[Placement]:
    for name in names:
        yield Placement(f"{source}.{name}", f"{target}.{name}", shapes[f"{target}.{name}"])
