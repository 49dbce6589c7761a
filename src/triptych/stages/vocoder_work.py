"""What a step of Code2Wav has to move and to compute, from the config alone. Imports no torch.

A step decodes B chunks of T frames each. With w bytes an element, P weights (all but the table of codes), H elements
of history a stream, h the hidden size, G codebooks and n samples a chunk:

    bytes of a step = w (P + B (2 H + T G h)) + 4 B n     (a first chunk writes its history and reads none: H, not 2 H)
    FLOPs of a step = 2 B (multiply-adds of a chunk)

Most of what a vocoder really moves is what its layers give to one another, 1920 samples of many channels a frame; it is
not counted, as a fused implementation would keep it in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.models.qwen3_omni.config import (
    CONVNEXT_EXPANSION,
    DILATIONS,
    KERNEL_SIZE,
    UPSAMPLE_TAPS,
    Code2WavConfig,
)
from triptych.telemetry.work import Work

SAMPLE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the decoder: its weights, its history a stream, and what one step of its output costs.

    `rate`: it makes so many steps of one; `trimmed`: but `rate` fewer at a stream's start.
    """

    weights: int
    history: int
    multiply_adds: int
    rate: int = 1
    trimmed: bool = False


class VocoderWork:
    """The arithmetic of one vocoder with `element_bytes` for each weight and each element of state."""

    def __init__(self, config: Code2WavConfig, *, element_bytes: int) -> None:
        self.config, self.element_bytes = config, element_bytes
        self._parts = tuple(_parts(config))
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        layers, hidden = config.num_hidden_layers, config.hidden_size
        products = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size
        self._frame_multiply_adds = layers * products
        self._pair_multiply_adds = layers * 2 * queries  # two products for each pair of a frame and one that it sees
        own = layers * (products + 4 * hidden) + hidden  # two norms and two scales a layer, and the last norm
        self.weights = own + sum(part.weights for part in self._parts)
        self.history = layers * 2 * keys * (config.sliding_window - 1) + sum(part.history for part in self._parts)

    def __call__(self, chunks: int, frames: int, *, first: bool) -> Work:
        """`chunks` chunks of `frames` frames each, all at their stream's start (`first`) or none."""
        config, window = self.config, self.config.sliding_window
        young = min(frames, window) if first else 0  # frames that see fewer than the whole window
        pairs = young * (young + 1) / 2 + (frames - young) * window
        multiply_adds = frames * self._frame_multiply_adds + pairs * self._pair_multiply_adds
        length = frames
        for part in self._parts:
            length = (length - (1 if first and part.trimmed else 0)) * part.rate
            multiply_adds += length * part.multiply_adds
        rows = frames * config.num_quantizers * config.hidden_size
        elements = self.weights + chunks * ((1 if first else 2) * self.history + rows)
        return Work(float(self.element_bytes * elements + SAMPLE_BYTES * chunks * length), 2.0 * chunks * multiply_adds)


def _parts(config: Code2WavConfig) -> Iterator[_Part]:
    """All behind the transformer, in order."""
    width, reach = config.hidden_size, KERNEL_SIZE - 1
    for factor in config.upsampling_ratios:
        yield _Part(weights=width * width * factor + width, history=0, multiply_adds=width * width, rate=factor)
        inner = CONVNEXT_EXPANSION * width
        yield _Part(
            weights=(KERNEL_SIZE + 1) * width + 2 * width + 2 * width * inner + inner + width + width,
            history=reach * width,
            multiply_adds=KERNEL_SIZE * width + 2 * width * inner,
        )
    yield _convolution(width, config.decoder_dim)
    width = config.decoder_dim
    for rate in config.upsample_rates:
        half = width // 2
        taps = UPSAMPLE_TAPS * width * half
        yield _Part(
            weights=2 * width + taps * rate + half,  # the Snake before it included, as in what follows
            history=(UPSAMPLE_TAPS - 1) * width,
            multiply_adds=taps,
            rate=rate,
            trimmed=True,
        )
        for dilation in DILATIONS:
            product = (KERNEL_SIZE + 1) * half * half
            yield _Part(weights=4 * half + product + 2 * half, history=reach * dilation * half, multiply_adds=product)
        width = half
    last = _convolution(width, 1)
    yield _Part(weights=2 * width + last.weights, history=last.history, multiply_adds=last.multiply_adds)


def _convolution(source: int, target: int) -> _Part:
    product = KERNEL_SIZE * source * target
    return _Part(weights=product + target, history=(KERNEL_SIZE - 1) * source, multiply_adds=product)
