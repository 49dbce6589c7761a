"""The tensors of a published Qwen3-Omni checkpoint, derived from Transformers' class on the meta device.

Published checkpoints name the Thinker's parts `thinker.model.*`, `thinker.audio_tower.*` and `thinker.visual.*`, and
store experts one by one. The class nests the three parts under `thinker.model.` and stacks the experts; Transformers
converts at load. Importing transformers' model takes seconds: for making and checking checkpoints, not for serving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from triptych.models.placement import Layout

_PREFIXES = (
    ("thinker.model.language_model.", "thinker.model."),
    ("thinker.model.audio_tower.", "thinker.audio_tower."),
    ("thinker.model.visual.", "thinker.visual."),
)
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def meta_model(raw: dict[str, Any]) -> nn.Module:
    """Transformers' `Qwen3OmniMoeForConditionalGeneration` of a parsed `config.json`, without storage."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    with torch.device("meta"):
        model: nn.Module = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig.from_dict(raw))
    return model


def published_name(name: str) -> str:
    """The checkpoint's name of a tensor that the class calls `name`."""
    for ours, published in _PREFIXES:
        if name.startswith(ours):
            return published + name[len(ours) :]
    return name


def published_shapes(raw: dict[str, Any], layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this `config.json`, in the class's order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in meta_model(raw).state_dict().items():
        for part, value in split(published_name(name), tensor, layout):
            shapes[part] = tuple(value.shape)
    return shapes


def split(name: str, tensor: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the fused layout as `layout` stores it.

    Stacked experts are gate_up_proj (experts, 2 x intermediate, hidden) and down_proj (experts, hidden, intermediate);
    one by one they are gate_proj and up_proj (intermediate, hidden) and down_proj (hidden, intermediate).
    """
    match = _FUSED_EXPERTS.fullmatch(name)
    if match is None or layout == "fused":
        yield name, tensor
        return
    experts, projection = match.groups()
    for expert, matrix in enumerate(tensor):
        if projection == "down_proj":
            yield f"{experts}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{experts}.{expert}.gate_proj.weight", gate
            yield f"{experts}.{expert}.up_proj.weight", up
