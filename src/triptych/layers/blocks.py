"""Weights laid out in memory as `rows.h` and `columns.h` read them, and all else that their structs point at."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.layers.quantized_weight import QuantizedWeight

_WIDE, _NARROW, _SCALED = range(3)  # `narrow` of a product


class Product(ctypes.Structure):
    """`Product` of `rows.h`."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("narrow", ctypes.c_int32),
    )


class Convolution(ctypes.Structure):
    """`Convolution` of `columns.h`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("dilation", ctypes.c_int32),
    )


class Blocks:
    """Lays out what the functions of `library` read, and holds it for as long as they may be called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._width = int(library.block_width())
        self._held: list[object] = []

    def whole(self, outputs: int) -> int:
        """`outputs` filled up to whole blocks: how long a row is that a product may write to."""
        return -(-outputs // self._width) * self._width

    def product(self, weight: Tensor | QuantizedWeight) -> Product:
        """A weight [outputs, inputs]: in bfloat16 if that holds it exactly, else in float32; one in int8 as it is."""
        scales: int | None = None
        if isinstance(weight, QuantizedWeight):
            kept, kind = weight.stored, _SCALED
            scales = self.floats(F.pad(weight.scale.flatten(), (0, -kept.shape[0] % self._width)))
        elif weight.dtype is torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight.float()):
            kept, kind = weight.bfloat16(), _NARROW
        else:
            kept, kind = weight.float(), _WIDE
        outputs, inputs = kept.shape
        words = F.pad(kept, (0, -inputs % (4 // kept.itemsize), 0, -outputs % self._width)).view(torch.int32)
        blocks = words.view(-1, self._width, words.shape[1]).transpose(1, 2).contiguous()
        self._held.append(blocks)
        return Product(blocks=blocks.data_ptr(), scales=scales, outputs=outputs, inputs=inputs, narrow=kind)

    def convolution(self, weight: Tensor, bias: Tensor, dilation: int = 1) -> Convolution:
        """A causal one: weight [outputs, inputs, taps], the newest tap last, bias [outputs]."""
        outputs, inputs, taps = weight.shape
        group = int(self._library.convolution_group())
        whole = outputs // group * group
        groups = weight[:whole].reshape(-1, group, inputs, taps).permute(0, 2, 3, 1)
        weights = torch.cat((groups.flatten(), weight[whole:].flatten()))
        return Convolution(
            weights=self.floats(weights),
            bias=self.floats(bias),
            outputs=outputs,
            inputs=inputs,
            taps=taps,
            dilation=dilation,
        )

    def norm(self, weight: Tensor) -> int:
        """The address of a norm's weight [..., size] times the root of its size."""
        return self.floats(weight.float() * weight.shape[-1] ** 0.5)

    def floats(self, values: Tensor) -> int:
        """The address of `values` in float32."""
        held = values.float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def array(self, kind: type[ctypes.Structure], items: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.Structure]:
        array = (kind * len(items))(*items)
        self._held.append(array)
        return array
