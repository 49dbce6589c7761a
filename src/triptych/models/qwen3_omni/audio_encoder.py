"""The Thinker's ear: log-mel frames to rows. Names and arithmetic are those of HF `Qwen3OmniMoeAudioEncoder`.

Chunks of 2 * n_window frames go through three convolutions of stride 2, each chunk with positions of its own; what they
leave attends within n_window_infer frames. So a clip may be cut at multiples of the latter, its `window`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.segment_attention import segment_attention
from triptych.layers.unfilled import Conv2d, Linear
from triptych.models.qwen3_omni.media_layout import audio_rows

_MAX_TIMESCALE = 10_000
_ROWS_A_CHUNK = 13  # what `audio_rows` assumes, as HF does, whatever n_window is


class AudioEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinker_config.audio_config`, with the defaults of transformers."""

    num_mel_bins: int = 128
    d_model: int = 1280
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    activation_function: str = "gelu"
    downsample_hidden_size: int = 480
    output_dim: int = 3584
    n_window: int = 50
    n_window_infer: int = 800
    conv_chunksize: int = 500

    @property
    def chunk(self) -> int:
        """Frames that the convolutions see at a time."""
        return 2 * self.n_window

    @property
    def window(self) -> int:
        """Frames that attend to each other: whole chunks."""
        return self.n_window_infer // self.chunk * self.chunk


class AudioEncoder(nn.Module):
    """Build it anywhere (the meta device too): what is in no checkpoint is computed on the host."""

    positions: Tensor

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        if config.activation_function != "gelu":
            raise ValueError(f"activation_function {config.activation_function!r} is not supported; only 'gelu' is")
        if config.n_window < 1 or config.window < 1:
            raise ValueError(f"n_window_infer {config.n_window_infer} is less than 2 x n_window {config.n_window}")
        if convolved(config.chunk) != _ROWS_A_CHUNK:
            raise ValueError(f"n_window {config.n_window} is not supported: a chunk must give {_ROWS_A_CHUNK} rows")
        self.config = config
        narrow, wide = config.downsample_hidden_size, config.d_model
        self.conv2d1 = Conv2d(1, narrow, 3, 2, padding=1)
        self.conv2d2 = Conv2d(narrow, narrow, 3, 2, padding=1)
        self.conv2d3 = Conv2d(narrow, narrow, 3, 2, padding=1)
        self.conv_out = Linear(narrow * convolved(config.num_mel_bins), wide, bias=False)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.ln_post = nn.LayerNorm(wide)
        self.proj1 = Linear(wide, wide)
        self.proj2 = Linear(wide, config.output_dim)
        self.register_buffer("positions", sinusoids(convolved(config.chunk), wide), persistent=False)

    def num_rows(self, frames: int) -> int:
        """How many rows a clip, or a slice of one, of so many frames gives."""
        return audio_rows(frames, self.config.n_window)

    def forward(self, slices: Sequence[Tensor], chunk: int) -> Tensor:
        """Spectrograms [mel bins, frames], each a clip or a slice of one -> their rows [n, output_dim] in order.

        `chunk` is the longest chunk of the clips they are from, min(frames of the clip, config.chunk). A shorter last
        chunk is padded to it before the convolutions, which see the padding (their bias makes it differ from nothing):
        so a slice gives what the whole clip gives only with the clip's own `chunk`.
        """
        pieces = [piece for mel in slices for piece in torch.split(mel, self.config.chunk, dim=1)]
        padded = torch.stack([F.pad(piece, (0, chunk - piece.shape[1])) for piece in pieces])
        x = torch.cat([self._convolve(part) for part in torch.split(padded, self.config.conv_chunksize)])
        x = x + self.positions[: x.shape[1]].to(x.dtype)
        x = torch.cat([rows[: convolved(piece.shape[1])] for rows, piece in zip(x, pieces, strict=True)])
        windows = [self.num_rows(part.shape[1]) for mel in slices for part in torch.split(mel, self.config.window, 1)]
        for layer in self.layers:
            x = layer(x, windows)
        out: Tensor = self.proj2(F.gelu(self.proj1(self.ln_post(x))))
        return out

    def _convolve(self, chunks: Tensor) -> Tensor:
        """[C, mel bins, frames] -> [C, convolved(frames), d_model]."""
        x = chunks.unsqueeze(1).to(self.conv2d1.weight.dtype)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(conv(x))
        out: Tensor = self.conv_out(x.permute(0, 3, 1, 2).flatten(2))
        return out


class AudioLayer(nn.Module):
    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.self_attn = AudioAttention(config.d_model, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, windows: Sequence[int]) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), windows)
        x = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        if x.dtype == torch.float16:
            limit = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-limit, limit)
        return x


class AudioAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"d_model {width} is no multiple of encoder_attention_heads {heads}")
        self.heads = heads
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.out_proj = Linear(width, width)

    def forward(self, x: Tensor, windows: Sequence[int]) -> Tensor:
        q, k, v = (project(x).unflatten(1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.out_proj(segment_attention(q, k, v, windows))
        return out


def convolved(frames: int) -> int:
    """What three convolutions of kernel 3, stride 2 and padding 1 leave of a chunk."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def sinusoids(length: int, channels: int) -> Tensor:
    """Position table [length, channels] on the host: sines, then cosines, of geometric frequencies (Whisper)."""
    if channels % 2 or channels < 4:
        raise ValueError(f"d_model {channels} is not an even number of at least 4")
    step = math.log(_MAX_TIMESCALE) / (channels // 2 - 1)
    frequencies = torch.exp(-step * torch.arange(channels // 2, device="cpu").float())
    angles = torch.arange(length, device="cpu")[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
