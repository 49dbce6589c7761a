"""Where each checkpoint tensor goes: the names a module fills itself from, and the place of each inside its parameters.

A module that can be loaded has `placements(layout) -> Iterator[Placement]`. The published checkpoints store experts
one by one ("per_expert"), Transformers may also store them stacked ("fused"): `layout` says which one is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["per_expert", "fused"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Tensor `source` of the checkpoint, of shape `shape`, is copied into parameter or buffer `target`.

    `target` is a dotted name below the stage's module. The place is `target[index][start : start + shape[0]]`; `index`
    None means the parameter itself (no leading axis is indexed).
    """

    source: str
    target: str
    shape: tuple[int, ...]
    start: int = 0
    index: int | None = None
