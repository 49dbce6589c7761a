"""The arithmetic of one draw: weights from logits, where top_k and top_p cut them, and the draw itself.

A row's result is the same bit for bit whatever rows are beside it, and on whatever kernels the batch's shape selects.
That holds by construction. Weights (exp of the scaled logits) are whole multiples of 2^-34 of the largest, so their
sums are integers below 2^53, exact in float64 in any order. top_k, top_p and min_p cut at a weight, never at a rank:
tokens tied with the last one kept are kept (as in HF's top_k), so the order a sort leaves them in cannot show. And the
draw walks the vocabulary in id order, with one uniform number from `random_stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from triptych.config.sampling import SamplingParams

UNIT = 2.0**34  # weight of the most likely token; one less likely by more than this factor is never drawn
_LEAST = -24.0  # exp of it is less than a unit
GREEDY = 1e-5  # a temperature below this is greedy
_FREEZING = 1e-37  # divided by this, every logit but the largest has no weight left
_FEW_ROWS = 4  # up to so many rows, selecting from each costs less than work over the whole vocabulary
_FEW = 64  # whole vector registers, so that every row's weights come from vector code, here and there
_NUCLEUS = 1024  # where a nucleus most often ends; looked at before a whole row is sorted
_CACHED = 2**19  # on CPU, more numbers than this are accumulated in pieces: fresh memory costs more than the sums


class Cuts(NamedTuple):
    """What each row of a batch is drawn with, all [B]: float32, int32, float64, float32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    least: Tensor  # the weight that min_p asks for

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu") -> Self:
        """A greedy row has weight in its largest logits alone."""
        temperature = [_FREEZING if row.temperature < GREEDY else row.temperature for row in params]
        top_k = [min(row.top_k or vocab_size, vocab_size) for row in params]  # may be larger than int32 holds
        return cls(
            torch.tensor(temperature, device=device),
            torch.tensor(top_k, dtype=torch.int32, device=device),
            torch.tensor([row.top_p for row in params], dtype=torch.float64, device=device),
            torch.tensor([row.min_p * UNIT for row in params], device=device),
        )


def draw_top(logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Draw one token from each row of logits [B, V], V up to 2^18, with uniforms [B] in [0, 1). Returns int64 [B].

    Temperature, then top_k (0: all), then top_p, the same for all rows. Temperature 0 takes the first largest logit.
    Nothing here waits for a CUDA device. A row that holds NaN gives some valid id.
    """
    if temperature < GREEDY:
        return logits.argmax(-1)
    x = logits.float()
    if x.device.type == "cpu" and x.shape[0] <= _FEW_ROWS and 0 < top_k < _FEW < x.shape[1]:
        few = _draw_from_few(x, uniforms, temperature, top_k, top_p)
        if few is not None:
            return few
    weights = token_weights(x, x.amax(-1, keepdim=True), temperature)
    if 0 < top_k < x.shape[1]:
        keep_at_least(weights, top_cut(weights, top_k, None, top_p if top_p < 1.0 else None))
    elif top_p < 1.0:
        keep_at_least(weights, nucleus_cut(weights, top_p))
    return invert(weights, uniforms.unsqueeze(1))


def _draw_from_few(x: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor | None:
    """The draw of `draw_top` from the largest logits alone: the same token, in half the time for a row or two.

    None where weights tie at the cut of top_k: then tokens beyond the largest are kept too. Sums of weights are exact,
    so leaving out what has no weight changes nothing.
    """
    best = x.topk(_FEW, -1)
    weights = token_weights(best.values, best.values[:, :1], temperature).numpy().astype(np.float64)
    tokens = best.indices.numpy()
    drawn = np.empty(len(tokens), dtype=np.int64)
    for row, (weight, token, uniform) in enumerate(zip(weights, tokens, uniforms.tolist(), strict=True)):
        if weight[top_k - 1] == weight[top_k] > 0.0:
            return None
        kept = weight[:top_k]
        if top_p < 1.0:
            total = kept.cumsum()
            # The weight that brings the sum to top_p is the last one kept, and those that tie with it.
            last = int((total - kept).searchsorted(total[-1] * top_p)) - 1
            kept = np.where(kept >= kept[last], kept, 0.0)
        order = token[:top_k].argsort()
        cumulative = kept[order].cumsum()
        place = int(cumulative.searchsorted((cumulative[-1] - 1.0) * uniform, side="right"))
        drawn[row] = token[order[min(place, top_k - 1)]]
    return torch.from_numpy(drawn)


def token_weights(x: Tensor, peak: Tensor, temperature: float | Tensor) -> Tensor:
    """exp((x - peak) / temperature) in whole units, 2^34 at the peak; float32 holds them exactly."""
    # Less than a unit is none, and vector code of exp leaves its fast path for what underflows, as -inf does.
    return (x - peak).div_(temperature).clamp_(min=_LEAST).exp_().mul_(UNIT).floor_()


def _at_least(weights: Tensor, cut: Tensor) -> Tensor:
    """1.0 where a weight reaches the cut [B, 1], else 0.0: to multiply by, which on CPU beats filling under a mask."""
    return torch.ge(weights, cut, out=torch.empty_like(weights))


def keep_at_least(weights: Tensor, cut: Tensor) -> None:
    weights.mul_(_at_least(weights, cut))


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row whose cumulative weight exceeds uniforms [B, 1] of the total."""
    rows, width = weights.shape
    if weights.device.type == "cpu" and rows > 1 and rows * width > _CACHED:
        size = max(1, _CACHED // width)
        return torch.cat([invert(weights[i : i + size], uniforms[i : i + size]) for i in range(0, rows, size)])
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # Of the total less one unit: then a uniform rounded up to 1 still finds the last token that has weight.
    target = (cumulative[:, -1:] - 1.0) * uniforms
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=width - 1)


def top_cut(weights: Tensor, depth: int, last: Tensor | None, top_p: float | Tensor | None) -> Tensor:
    """The smallest weight [B, 1] that top_k, then top_p keep.

    `depth` is how many weights to rank: top_k itself, unless `last` [B, 1] gives each row's top_k - 1.
    """
    ranked = _largest(weights, depth)
    cut = ranked[:, -1:] if last is None else ranked.gather(1, last)
    if top_p is None:
        return cut
    # Summed over the vocabulary: `ranked` may lack tokens that are tied with its last and so kept.
    kept = _at_least(weights, cut).mul_(weights).sum(-1, keepdim=True, dtype=torch.float64)
    return _nucleus_end(ranked, kept.mul_(top_p))


def nucleus_cut(weights: Tensor, top_p: float | Tensor) -> Tensor:
    """The smallest weight [B, 1] that top_p alone keeps."""
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64).mul_(top_p)
    # Sorting a vocabulary is slow on CPU, and looking at a value there costs nothing.
    if weights.device.type == "cpu" and weights.shape[1] > _NUCLEUS:
        ranked = _largest(weights, _NUCLEUS)
        if bool((ranked.sum(-1, keepdim=True, dtype=torch.float64) >= mass).all()):
            return _nucleus_end(ranked, mass)
    return _nucleus_end(_largest(weights, weights.shape[1]), mass)


def _nucleus_end(ranked: Tensor, mass: Tensor) -> Tensor:
    """The smallest of the descending weights [B, K] whose betters together weigh less than `mass` [B, 1]."""
    betters = ranked.cumsum(-1, dtype=torch.float64).sub_(ranked)
    return torch.where(betters < mass, ranked, ranked[:, :1]).amin(-1, keepdim=True)


def _largest(x: Tensor, depth: int) -> Tensor:
    """The `depth` largest values of each row [B, depth], descending. Values only, so every method gives the same.

    The time of a selection on CPU is that of its mispredicted branches, so it is spent on fewer numbers: values are
    grouped, and only the groups with the `depth` largest maxima can hold one of the `depth` largest values.
    """
    rows, width = x.shape
    if depth * 4 > width:
        if x.device.type == "cpu":  # NumPy's sort is vectorised
            return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)[:, :depth]
        return x.sort(-1, descending=True).values[:, :depth]
    group = 1 << ((width // depth).bit_length() // 2)  # about as many maxima as members of the best groups
    if rows * width < 8192 or x.device.type != "cpu" or group < 4 or width % group:
        return x.topk(depth, -1).values
    grouped = x.reshape(rows, group, width // group)
    best = grouped.amax(1).topk(depth, -1, sorted=False).indices
    members = grouped.gather(2, best.unsqueeze(1).expand(rows, group, depth))
    return members.reshape(rows, group * depth).topk(depth, -1).values
