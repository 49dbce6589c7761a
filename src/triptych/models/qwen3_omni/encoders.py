"""The audio and vision encoders of the Thinker: Transformers' own modules, and the checkpoint tensors that fill them.

The names are those of `Qwen3OmniMoeAudioEncoder` and `Qwen3OmniMoeVisionEncoder`, below `thinker.audio_tower.` and
`thinker.visual.`. A text-only Thinker passes PREFIXES to the loader as ignored and never imports transformers' models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from triptych.models.placement import Layout, Placement

PREFIXES = ("thinker.audio_tower.", "thinker.visual.")


class Encoders(nn.Module):
    """Both encoders of a parsed `config.json`, as `audio_tower` and `visual`.

    Build them on a real device: they compute position tables that are in no checkpoint.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        from transformers import Qwen3OmniMoeConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeAudioEncoder,
            Qwen3OmniMoeVisionEncoder,
        )

        thinker = Qwen3OmniMoeConfig.from_dict(raw).thinker_config
        self.audio_tower: nn.Module = Qwen3OmniMoeAudioEncoder._from_config(thinker.audio_config)
        self.visual: nn.Module = Qwen3OmniMoeVisionEncoder._from_config(thinker.vision_config)

    def placements(self, layout: Layout) -> Iterator[Placement]:
        """Every tensor of both encoders. Encoders have no experts, so the layout makes no difference."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            yield Placement(f"thinker.{name}", name, tuple(tensor.shape))


def encoder_placements(raw: dict[str, Any]) -> list[Placement]:
    """The encoders' tensors for a parsed `config.json`, without building them."""
    with torch.device("meta"):
        return list(Encoders(raw).placements("per_expert"))
