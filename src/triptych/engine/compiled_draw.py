"""The draws of a batch as one call of compiled code, see `draw.c`. One thread, on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from triptych.engine.draw import Cuts
from triptych.layers.compiled import compiled

SOURCE = Path(__file__).with_name("draw.c")


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
