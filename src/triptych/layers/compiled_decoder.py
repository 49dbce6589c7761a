"""A stack of decoder layers over a paged cache as compiled code, see `decoder.c`. One thread, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from triptych.layers.attention import RowMetadata
from triptych.layers.blocks import Blocks, Product
from triptych.layers.compiled import compiled
from triptych.layers.decoder import BetweenLayers, DecoderLayer
from triptych.layers.linear import GatedMLP
from triptych.layers.norm import RMSNorm
from triptych.layers.product import give_up, held_weight

SOURCE = Path(__file__).with_name("decoder.c")
DTYPES = (torch.float32, torch.bfloat16)  # of a stage, and so of its cache


class _Gated(ctypes.Structure):
    _fields_ = (("into", Product), ("back", Product))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "router", "shared_gate")),
        ("mlp", _Gated),
        ("experts", ctypes.POINTER(_Gated)),
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "post_norm")),
        *((name, ctypes.c_int32) for name in ("num_experts", "top_k", "norm_top_k")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "narrow_cache")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("caches", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("blocks", "starts", "lengths", "cos", "signed_sin", "x", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "stride", "longest")),
    )


class CompiledDecoder:
    """Holds the weights of `layers`, at least one, and of the `norm` behind them, laid out for the compiled code.

    The layers have been loaded and not prepared, and give up their weights. Rows are float32 from the first layer to
    the last, whatever the stage's dtype; keys and values are kept in it.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        self._scratch_floats, self._run_layers, self._norm_rows = (
            library.scratch_floats,
            library.run_layers,
            library.norm_rows,
        )
        self._scratch_floats.restype = ctypes.c_int64
        self._run_layers.restype = self._norm_rows.restype = None
        self._blocks = blocks = Blocks(library)
        self._scratch = torch.empty(0)
        attention = layers[0].attention
        self._hidden, self._stride = norm.size, blocks.whole(norm.size)
        self._norm = blocks.norm(norm.weight)
        self._decoder = _Decoder(
            layers=blocks.array(_Layer, [self._layer(layer) for layer in layers]),
            eps=norm.eps,
            num_layers=len(layers),
            hidden=norm.size,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
        )
        self.itemsize = (4, 2, 1)[self._decoder.layers[0].qkv.narrow]

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        caches: Sequence[Tensor],
        metadata: RowMetadata,
        between: BetweenLayers | None,
    ) -> Tensor:
        """x [N, hidden], cos and signed_sin float32 [N, 1, head_dim] -> normalised hidden states [N, hidden].

        Rows behind those of `metadata` are padding: nothing but `between` sees them. The caches, one a layer, are of
        this object's own writing, see `Step` in `decoder.h`.
        """
        count, rows, layers = x.shape[0], metadata.starts.shape[0], len(caches)
        wide = torch.empty(count, self._stride)
        states = wide[:, : self._hidden]
        states.copy_(x)
        decoder = self._decoder
        decoder.block_size, decoder.narrow_cache = caches[0].shape[1], caches[0].dtype is torch.bfloat16
        needed = self._scratch_floats(ctypes.byref(decoder), ctypes.c_int64(rows), ctypes.c_int64(metadata.longest))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        step = _Step(
            caches=(ctypes.c_void_p * layers)(*(cache.data_ptr() for cache in caches)),
            blocks=metadata.blocks.data_ptr(),
            starts=metadata.starts.data_ptr(),
            lengths=metadata.lengths.data_ptr(),
            cos=cos.data_ptr(),
            signed_sin=signed_sin.data_ptr(),
            x=wide.data_ptr(),
            scratch=self._scratch.data_ptr(),
            rows=rows,
            stride=self._stride,
            longest=metadata.longest,
        )
        if between is None:
            self._run_layers(ctypes.byref(decoder), ctypes.byref(step), 0, layers)
        else:
            for layer in range(layers):
                self._run_layers(ctypes.byref(decoder), ctypes.byref(step), layer, layer + 1)
                if (changed := between(layer, states)) is not states:
                    states.copy_(changed)
        out = torch.zeros(count, self._hidden)
        self._norm_rows(
            ctypes.byref(decoder), ctypes.byref(step), ctypes.c_void_p(self._norm), ctypes.c_void_p(out.data_ptr())
        )
        return out.to(x.dtype)

    def _layer(self, layer: DecoderLayer) -> _Layer:
        blocks, attention, experts = self._blocks, layer.attention, layer.feed_forward
        laid_out = _Layer(
            qkv=blocks.product(held_weight(attention, "qkv")),
            out=blocks.product(held_weight(attention, "out")),
            input_norm=blocks.norm(layer.input_norm.weight),
            qk_norm=blocks.norm(attention.head_norms),
            post_norm=blocks.norm(layer.post_norm.weight),
        )
        if isinstance(experts, GatedMLP):
            laid_out.mlp = self._gated(experts)
        else:
            laid_out.router = blocks.product(experts.router)
            into, back = held_weight(experts, "gate_up"), held_weight(experts, "down")
            laid_out.experts = blocks.array(
                _Gated,
                [
                    _Gated(into=blocks.product(into[expert]), back=blocks.product(back[expert]))
                    for expert in range(experts.num_experts)
                ],
            )
            laid_out.num_experts, laid_out.top_k = experts.num_experts, experts.top_k
            laid_out.norm_top_k = experts.norm_topk_prob
            if experts.shared is not None:
                laid_out.mlp = self._gated(experts.shared)
                laid_out.shared_gate = blocks.product(experts.shared_gate)
        _give_up_all(attention, experts)
        return laid_out

    def _gated(self, mlp: GatedMLP) -> _Gated:
        into, back = held_weight(mlp, "gate_up"), held_weight(mlp, "down")
        return _Gated(into=self._blocks.product(into), back=self._blocks.product(back))


def _give_up_all(*modules: torch.nn.Module) -> None:
    for module in modules:
        for part in module.modules():
            # Weights in eight bits are no parameters.
            for name in {name for name, _ in part.named_parameters(recurse=False)} | {
                *getattr(part, "projections", ())
            }:
                give_up(part, name)


def compiled_code() -> ctypes.CDLL | None:
    """What `CompiledDecoder` calls; None where it cannot be compiled."""
    return compiled(SOURCE)
