"""Causal convolutions over [B, C, T] that stream exactly. See `state` for the contract."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.streaming.state import StreamChunk, StreamingLayer, last_steps


class CausalConv1d(StreamingLayer):
    """Stride-1 convolution that sees `(kernel_size - 1) * dilation` earlier inputs, zeros before the stream's start.

    Dense or depthwise (`groups` = channels). `prepare` once after the weights are in.
    """

    _taps: tuple[Tensor, ...]
    _bias: Tensor

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels))
        if groups not in (1, in_channels) or (groups > 1 and out_channels != in_channels):
            raise ValueError(f"groups must be 1 or in_channels = out_channels, not {groups}")
        self.dilation = dilation
        self.groups = groups
        self.reach = (kernel_size - 1) * dilation
        self.history_shape = (in_channels, self.reach)

    def prepare(self) -> None:
        """Lay the weight out as a step on CPU multiplies it: a tap is one matrix [1, C_out, C_in], depthwise [C, 1]."""
        if self.weight.device.type != "cpu":
            return
        taps = self.weight.permute(2, 0, 1).contiguous()
        self.weight = nn.Parameter(taps.permute(1, 2, 0), requires_grad=False)  # the same memory: nothing is held twice
        self._taps = (taps if self.groups > 1 else taps.unsqueeze(1)).unbind(0)
        self._bias = self.bias[:, None]

    def join(self, like: Tensor, chunk: StreamChunk | None) -> tuple[Tensor, Tensor]:
        """A buffer [B, C, reach + T] that begins with the history, and its last T steps for the caller to fill.

        Lets the layer before write its result where the convolution reads it, which saves a copy of the chunk.
        """
        batch, channels, length = like.shape
        buffer = like.new_empty(batch, channels, self.reach + length)
        history = chunk.history(self) if chunk is not None and self.reach else None
        if history is None:
            buffer[..., : self.reach] = 0
        else:
            buffer[..., : self.reach] = history
        return buffer, buffer[..., self.reach :]

    def convolve(self, joined: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C_in, reach + T] from `join` -> [B, C_out, T]."""
        if chunk is not None and self.reach:
            chunk.keep(self, joined[..., joined.shape[-1] - self.reach :])
        if joined.device.type != "cpu":
            return F.conv1d(joined, self.weight, self.bias, dilation=self.dilation, groups=self.groups)
        # On shifted views one product per tap is 1.1 to 3 times faster than oneDNN's convolution of few channels.
        length = joined.shape[-1] - self.reach
        out: Tensor = self._bias
        for index, tap in enumerate(self._taps):
            shifted = joined[..., index * self.dilation : index * self.dilation + length]
            if self.groups > 1:
                out = torch.addcmul(out, shifted, tap) if index == 0 else out.addcmul_(shifted, tap)
            else:
                tap = tap.expand(joined.shape[0], -1, -1)
                out = torch.baddbmm(out, tap, shifted) if index == 0 else out.baddbmm_(tap, shifted)
        return out

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C_in, T] -> [B, C_out, T]."""
        joined, latest = self.join(x, chunk)
        latest.copy_(x)
        return self.convolve(joined, chunk)


class PointwiseConv1d(nn.Module):
    """Convolution with kernel 1: a matrix product per step, without a history. `prepare` once after loading."""

    _matrix: Tensor
    _bias: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 1))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def prepare(self) -> None:
        """Look up the [1, C_out, C_in] matrix once instead of at every step."""
        self._matrix = self.weight.permute(2, 0, 1)
        self._bias = self.bias[:, None]

    def accumulate(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the convolution of x [B, C_in, T] to `total` [B, C_out, T] in place, and return it."""
        return total.baddbmm_(self._matrix.expand(x.shape[0], -1, -1), x).add_(self._bias)


class TransposedConv1d(StreamingLayer):
    """Upsampling by `stride` with a kernel of `taps * stride`, trimmed by kernel - stride samples on both sides.

    The right trim is what later inputs would still change; the left trim happens once per stream. Both fall out of one
    rule: keep the last `taps - 1` inputs, join them to the chunk, and trim the joined result as the one-shot run does.
    That recomputes `taps - 1` steps a chunk, but needs less memory than the overlap of the outputs would, and sums
    every sample in the one-shot run's order. A first chunk of T steps gives (T - taps + 1) * stride, a later one
    T * stride. `prepare` once after the weights are in.
    """

    _phases: tuple[Tensor, ...]
    _bias: Tensor

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels, taps * stride))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride
        self.reach = taps - 1
        self.history_shape = (in_channels, self.reach)

    def prepare(self) -> None:
        """Lay the weight out as a step on CPU multiplies it: one [1, stride * C_out, C_in] matrix a tap."""
        if self.weight.device.type != "cpu":
            return
        in_channels, out_channels, _ = self.weight.shape
        phases = self.weight.permute(2, 1, 0).contiguous()
        self.weight = nn.Parameter(phases.permute(2, 1, 0), requires_grad=False)  # the same memory
        self._phases = phases.view(self.reach + 1, 1, self.stride * out_channels, in_channels).unbind(0)
        self._bias = self.bias.repeat(self.stride)[:, None]

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        """[B, C_in, T] -> [B, C_out, T * stride], less the trim on a first chunk and in a one-shot run."""
        if chunk is not None and self.reach:
            history = chunk.history(self)
            x = x if history is None else torch.cat([history, x], dim=-1)
            chunk.keep(self, last_steps(x, self.reach, -1))
        if x.device.type != "cpu":
            return F.conv_transpose1d(x, self.weight, self.bias, stride=self.stride, padding=self.reach * self.stride)
        # As for CausalConv1d: product by product, all `stride` output phases of one input step at once.
        batch, length = x.shape[0], x.shape[-1] - self.reach
        out: Tensor = self._bias
        for index, phase in enumerate(self._phases):
            shifted = x[..., self.reach - index : self.reach - index + length]
            phase = phase.expand(batch, -1, -1)
            out = torch.baddbmm(out, phase, shifted) if index == 0 else out.baddbmm_(phase, shifted)
        out_channels = self.bias.shape[0]
        out = out.view(batch, self.stride, out_channels, length).permute(0, 2, 3, 1)
        return out.reshape(batch, out_channels, length * self.stride)
