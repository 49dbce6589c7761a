"""The draws of a batch as one call of compiled code, see `draw.c`. One thread, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from triptych.config.sampling import SamplingParams
from triptych.engine.draw import FREEZING, GREEDY, UNIT
from triptych.layers.compiled import compiled

SOURCE = Path(__file__).with_name("draw.c")


class Cuts(NamedTuple):
    """What each row of a batch is drawn with, all [rows]: float32, int32, float64, float32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    least: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Self:
        """A greedy row has weight in its largest logits alone."""
        return cls(
            torch.tensor([FREEZING if row.temperature < GREEDY else row.temperature for row in params]),
            torch.tensor([min(row.top_k or vocab_size, vocab_size) for row in params], dtype=torch.int32),
            torch.tensor([row.top_p for row in params], dtype=torch.float64),
            torch.tensor([row.min_p * UNIT for row in params]),
        )


class CompiledDraw:
    """Draws from rows of `vocab_size` logits what `draw_top` does, each row by itself."""

    def __init__(self, library: ctypes.CDLL, vocab_size: int) -> None:
        self._draw_rows = library.draw_rows
        self._draw_rows.restype = None
        dtypes = (torch.float32, torch.int64, torch.int32)
        self._room = tuple(torch.empty(vocab_size, dtype=dtype) for dtype in dtypes)

    def __call__(self, logits: Tensor, uniforms: Tensor, cuts: Cuts) -> Tensor:
        """logits float32 [B, vocab_size], uniforms float64 [B] in [0, 1] -> int64 [B]."""
        rows, size = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        tensors = (logits.contiguous(), uniforms.contiguous(), *cuts, *self._room, tokens)
        self._draw_rows(rows, size, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
        return tokens


def compiled_draw(vocab_size: int) -> CompiledDraw | None:
    """None where it cannot be compiled."""
    code = compiled(SOURCE)
    return None if code is None else CompiledDraw(code, vocab_size)
