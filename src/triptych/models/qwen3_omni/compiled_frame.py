"""The code predictor's whole frame as one call of compiled code, see `code_predictor.c`. One thread, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triptych.layers.blocks import Blocks, Product
from triptych.layers.compiled import compiled
from triptych.layers.decoder import DecoderLayer
from triptych.layers.linear import GatedMLP
from triptych.layers.norm import RMSNorm
from triptych.models.qwen3_omni.config import DecoderConfig

SOURCE = Path(__file__).with_name("code_predictor.c")


class Drawing(Protocol):
    """What residual codes are drawn with. `uniforms` float64 [n, residuals] in [0, 1); `greedy` bool [n]."""

    uniforms: Tensor
    greedy: Tensor
    top_k: int
    top_p: float


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "post_norm")),
    )


class _Predictor(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("draws", ctypes.POINTER(Product)),
        *((name, ctypes.c_void_p) for name in ("norm", "cos", "sin", "tables")),
        ("top_p", ctypes.c_double),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_layers", "residuals", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("intermediate", "vocab", "narrow_tables", "top_k")),
    )


class CompiledFrame:
    """Holds a code predictor's weights, laid out for the compiled code, and draws frames with them.

    `layers` and `norm` are prepared; `layers` still hold their weights, and `heads` [residuals, vocab, hidden] as well.
    `cos` and `signed_sin` [residuals + 1, 1, head_dim] as of `Rotary`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        *,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        heads: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
    ) -> None:
        self._scratch_floats, self._draw_frames = library.scratch_floats, library.draw_frames
        self._scratch_floats.restype = ctypes.c_int64
        self._draw_frames.restype = None
        self._blocks = blocks = Blocks(library)
        self._scratch = torch.empty(0)
        self.residuals, self.vocab = heads.shape[:2]
        self._predictor = _Predictor(
            layers=blocks.array(_Layer, [self._layer(layer) for layer in layers]),
            draws=blocks.array(Product, [blocks.product(head) for head in heads]),
            norm=blocks.norm(norm.weight),
            cos=blocks.floats(cos[:, 0, config.head_dim // 2 :]),
            sin=blocks.floats(signed_sin[:, 0, config.head_dim // 2 :]),
            eps=config.rms_norm_eps,
            num_layers=len(layers),
            residuals=self.residuals,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=self.vocab,
        )

    def use_tables(self, tables: Tensor) -> None:
        """Embed residual codes from `tables` [residuals, vocab, hidden]."""
        self._tables = (tables if tables.dtype in (torch.float32, torch.bfloat16) else tables.float()).contiguous()
        self._predictor.tables = self._tables.data_ptr()
        self._predictor.narrow_tables = self._tables.dtype is torch.bfloat16

    def __call__(self, hidden: Tensor, first: Tensor, drawing: Drawing, logits: Tensor | None = None) -> Tensor:
        """hidden and first [n, hidden] -> codes [n, residuals]; `logits` float32 [n, residuals, vocab] is filled."""
        rows = hidden.shape[0]
        predictor = self._predictor
        predictor.top_k, predictor.top_p = drawing.top_k, drawing.top_p
        needed = self._scratch_floats(ctypes.byref(predictor), rows)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.float32)
        codes = torch.empty(rows, self.residuals, dtype=torch.int64)
        inputs = (
            hidden.float().contiguous(),
            first.float().contiguous(),
            drawing.uniforms.contiguous(),
            drawing.greedy.contiguous(),
            self._scratch,
            codes,
        )
        self._draw_frames(
            ctypes.byref(predictor),
            rows,
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs),
            None if logits is None else ctypes.c_void_p(logits.data_ptr()),
        )
        return codes

    def _layer(self, layer: DecoderLayer) -> _Layer:
        blocks, attention, mlp = self._blocks, layer.attention, layer.feed_forward
        assert isinstance(mlp, GatedMLP)
        return _Layer(
            qkv=blocks.product(attention.qkv),
            out=blocks.product(attention.out),
            gate_up=blocks.product(mlp.gate_up),
            down=blocks.product(mlp.down),
            input_norm=blocks.norm(layer.input_norm.weight),
            qk_norm=blocks.norm(attention.head_norms),
            post_norm=blocks.norm(layer.post_norm.weight),
        )


def compiled_code() -> ctypes.CDLL | None:
    """What `CompiledFrame` calls; None where it cannot be compiled."""
    return compiled(SOURCE)
