"""Attention without mask or cache, each row over the segment it is in: what the encoders do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[int]) -> Tensor:
    """q, k and v [N, heads, D], N the sum of the segments' lengths -> [N, heads * D].

    Neighbours of one length share a call; there is no padding.
    """
    pieces, start = [], 0
    for length, alike in itertools.groupby(segments):
        count = len(list(alike))
        end = start + count * length
        queries, keys, values = (t[start:end].reshape(count, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(queries, keys, values)
        pieces.append(attended.transpose(1, 2).reshape(count * length, -1))
        start = end
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
