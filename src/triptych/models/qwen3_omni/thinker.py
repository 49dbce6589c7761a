"""The Thinker's text decoder: token ids to next-token logits (HF `Qwen3OmniMoeThinkerForConditionalGeneration`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.linear import ROW_TILE
from triptych.layers.product import take_product
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.backbone import Backbone, layer_placements
from triptych.models.qwen3_omni.config import OmniConfig


class Thinker(nn.Module):
    """Embedding, decoder stack, head. Build it on the meta device, load it, then call `prepare`."""

    prefixes: tuple[str, ...] = ("thinker.model.", "thinker.lm_head.")  # the encoders load apart

    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        self.config = config.thinker
        self.embed_tokens = nn.Parameter(
            torch.empty(self.config.vocab_size, self.config.hidden_size), requires_grad=False
        )
        self.backbone = Backbone(self.config)
        self.lm_head = nn.Parameter(torch.empty(self.config.vocab_size, self.config.hidden_size), requires_grad=False)

    def placements(self, layout: Layout) -> Iterator[Placement]:
        """Every tensor of the text decoder; the encoders have their own."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        yield Placement("thinker.model.embed_tokens.weight", "embed_tokens", shape)
        yield Placement("thinker.lm_head.weight", "lm_head", shape)
        yield from layer_placements(self.config, "thinker.model", "backbone", layout)

    def prepare(self, *, row_tile: int = ROW_TILE, eager: bool = True) -> None:
        """Derive what the layers need. Not `eager`: with compiled code where there is some and it can be compiled."""
        self.backbone.prepare(row_tile, eager=eager, part="Thinker")
        self.head = take_product(self, "lm_head")

    def embed(self, token_ids: Tensor) -> Tensor:
        """ids [N] -> [N, hidden]."""
        return F.embedding(token_ids, self.embed_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] in float32."""
        return self.head(hidden).float()
