"""Code2Wav's chunk as one call of compiled code, see `code2wav.c`. One thread, on a CPU."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.layers.blocks import Blocks, Convolution, Product
from triptych.layers.compiled import compiled
from triptych.models.qwen3_omni.code2wav_layers import (
    DecoderBlock,
    ResidualUnit,
    SnakeBeta,
    TransformerLayer,
    UpsampleBlock,
)
from triptych.models.qwen3_omni.config import DILATIONS, KERNEL_SIZE
from triptych.streaming.conv import TransposedConv1d
from triptych.streaming.state import StreamChunk, StreamingLayer, StreamState

if TYPE_CHECKING:
    from triptych.models.qwen3_omni.code2wav import Code2Wav

SOURCE = Path(__file__).with_name("code2wav.c")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "attention_scale", "mlp_norm", "mlp_scale")),
    )


class _Upsample(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("conv", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("conv_bias", "depthwise", "depthwise_bias", "norm", "norm_bias")),
        *((name, ctypes.c_void_p) for name in ("up_bias", "down_bias", "gamma")),
        ("factor", ctypes.c_int32),
    )


class _Snake(ctypes.Structure):
    _fields_ = (("half_turns", ctypes.c_void_p), ("magnitude", ctypes.c_void_p))


class _Unit(ctypes.Structure):
    _fields_ = (("snake1", _Snake), ("snake2", _Snake), ("conv1", Convolution), ("conv2", Convolution))


class _Block(ctypes.Structure):
    _fields_ = (
        ("snake", _Snake),
        ("upsample", Convolution),
        ("units", ctypes.POINTER(_Unit)),
        ("rate", ctypes.c_int32),
    )


class _Vocoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("upsamples", ctypes.POINTER(_Upsample)),
        ("blocks", ctypes.POINTER(_Block)),
        ("conv_in", Product),
        ("snake_out", _Snake),
        ("conv_out", Convolution),
        *((name, ctypes.c_void_p) for name in ("table", "inverse_frequencies", "norm", "conv_in_bias")),
        ("history", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_upsamples", "num_blocks", "num_units", "quantizers")),
        *((name, ctypes.c_int32) for name in ("codebook_size", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("intermediate", "memory", "kernel")),
    )


class CompiledVocoder(StreamingLayer):
    """Holds a vocoder's weights, laid out for the compiled code, and decodes chunks with them.

    `model` still has its weights, which may go afterwards, but for the table of codes. Its whole state is one history
    of as many numbers as those of its layers.
    """

    def __init__(self, library: ctypes.CDLL, model: Code2Wav) -> None:
        super().__init__()
        self._decode = library.decode
        self._blocks = blocks = Blocks(library)
        config = model.config
        layers = [layer for layer in model.modules() if isinstance(layer, StreamingLayer)]
        self.history_shape = (sum(math.prod(layer.history_shape) for layer in layers),)
        self._vocoder = _Vocoder(
            layers=blocks.array(
                _Layer, [self._layer(each) for each in model.layers if isinstance(each, TransformerLayer)]
            ),
            upsamples=blocks.array(
                _Upsample, [self._upsample(each) for each in model.upsample if isinstance(each, UpsampleBlock)]
            ),
            blocks=blocks.array(_Block, [self._block(each) for each in model.blocks if isinstance(each, DecoderBlock)]),
            conv_in=blocks.product(model.conv_in.weight.transpose(1, 2).flatten(1)),
            snake_out=self._snake(model.snake_out),
            conv_out=blocks.convolution(model.conv_out.weight, model.conv_out.bias),
            table=blocks.floats(model.code_embedding),
            inverse_frequencies=blocks.floats(model.inverse_frequencies),
            norm=blocks.norm(model.norm),
            conv_in_bias=blocks.floats(model.conv_in.bias),
            history=self.history_shape[0],
            eps=config.rms_norm_eps,
            num_layers=len(model.layers),
            num_upsamples=len(model.upsample),
            num_blocks=len(model.blocks),
            num_units=len(DILATIONS),
            quantizers=config.num_quantizers,
            codebook_size=config.codebook_size,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            memory=config.sliding_window - 1,
            kernel=KERNEL_SIZE,
        )
        library.scratch_floats.restype = ctypes.c_int64
        self._scratch = torch.zeros(library.scratch_floats(ctypes.byref(self._vocoder)))

    def decode(self, codes: Tensor, chunk: StreamChunk | None, num_samples: int) -> Tensor:
        """codes [B, num_quantizers, T] -> float32 samples [B, num_samples], as of `Code2Wav.forward`.

        Raises IndexError where a code or a slot is out of its range.
        """
        streams, _, frames = codes.shape
        if chunk is None:  # a one-shot run is a stream of a single chunk
            state = StreamState(self, streams, device="cpu", dtype=torch.float32)
            chunk = state.chunk(torch.arange(streams), first=True)
        histories, num_frames = chunk.storage(self)
        samples = torch.empty(streams, num_samples)
        inputs = (codes.to(torch.int32).contiguous(), chunk.slots.contiguous())
        done = self._decode(
            ctypes.byref(self._vocoder),
            streams,
            frames,
            int(chunk.first),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs),
            ctypes.c_int64(histories.shape[0]),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (histories, num_frames, self._scratch, samples)),
        )
        if not done:
            raise IndexError(
                f"codes must be in [0, {self._vocoder.codebook_size}) and slots in [0, {histories.shape[0]})"
            )
        return samples

    def _layer(self, layer: TransformerLayer) -> _Layer:
        blocks = self._blocks
        return _Layer(
            qkv=blocks.product(layer.attention.qkv.weight),
            out=blocks.product(layer.attention.out.weight),
            gate_up=blocks.product(layer.gate_up.weight),
            down=blocks.product(layer.down.weight),
            attention_norm=blocks.norm(layer.attention_norm),
            attention_scale=blocks.floats(layer.attention_scale),
            mlp_norm=blocks.norm(layer.mlp_norm),
            mlp_scale=blocks.floats(layer.mlp_scale),
        )

    def _upsample(self, upsample: UpsampleBlock) -> _Upsample:
        blocks, conv, depthwise = self._blocks, upsample.conv, upsample.depthwise
        return _Upsample(
            conv=blocks.product(_phases(conv)[..., 0].contiguous()),
            up=blocks.product(upsample.up.weight),
            down=blocks.product(upsample.down.weight),
            conv_bias=blocks.floats(conv.bias.repeat(conv.stride)),
            depthwise=blocks.floats(depthwise.weight[:, 0].T),
            depthwise_bias=blocks.floats(depthwise.bias),
            norm=blocks.floats(upsample.norm.weight),
            norm_bias=blocks.floats(upsample.norm.bias),
            up_bias=blocks.floats(upsample.up.bias),
            down_bias=blocks.floats(upsample.down.bias),
            gamma=blocks.floats(upsample.gamma),
            factor=conv.stride,
        )

    def _block(self, block: DecoderBlock) -> _Block:
        conv = block.upsample
        return _Block(
            snake=self._snake(block.snake),
            upsample=self._blocks.convolution(_phases(conv), conv.bias.repeat(conv.stride)),
            units=self._blocks.array(
                _Unit, [self._unit(unit) for unit in block.units if isinstance(unit, ResidualUnit)]
            ),
            rate=conv.stride,
        )

    def _unit(self, unit: ResidualUnit) -> _Unit:
        blocks, conv = self._blocks, unit.conv1
        return _Unit(
            snake1=self._snake(unit.snake1),
            snake2=self._snake(unit.snake2),
            conv1=blocks.convolution(conv.weight, conv.bias, conv.dilation),
            conv2=blocks.convolution(unit.conv2.weight, unit.conv2.bias),
        )

    def _snake(self, snake: SnakeBeta) -> _Snake:
        snake.prepare()
        return _Snake(
            half_turns=self._blocks.floats(snake.frequency / math.pi),
            magnitude=self._blocks.floats(snake.inverse_magnitude),
        )


def _phases(conv: TransposedConv1d) -> Tensor:
    """The causal convolution [stride * C_out, C_in, taps] that gives all `stride` outputs of a step at once."""
    in_channels, out_channels, _ = conv.weight.shape
    phases = conv.weight.view(in_channels, out_channels, conv.reach + 1, conv.stride).flip(2)
    return phases.permute(3, 1, 0, 2).reshape(conv.stride * out_channels, in_channels, conv.reach + 1)


def compiled_code() -> ctypes.CDLL | None:
    """What `CompiledVocoder` calls; None where it cannot be compiled."""
    return compiled(SOURCE)
