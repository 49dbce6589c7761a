"""The parts of the checkpoint that are trained, as Transformers' own classes, and the table they share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerTextModel,
)

_EMBEDDING_SEED = 20_240_101
# Residual codes are drawn at temperature 1 by every loader; with their heads scaled by this, that is a quarter.
SHARPER = 4.0


def text_embedding(vocab_size: int, hidden: int) -> Tensor:
    """The Thinker's embedding table [vocab, hidden]: drawn once, never trained.

    Thinker and Talker both read it, and with fixed rows either can be trained without the other.
    """
    generator = torch.Generator().manual_seed(_EMBEDDING_SEED)
    return torch.randn(vocab_size, hidden, generator=generator)


class TextThinker(nn.Module):
    """The Thinker's text decoder and head, without its encoders."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config.text_config
        config._attn_implementation = "sdpa"
        config._experts_implementation = "eager"
        self.model = Qwen3OmniMoeThinkerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        widen(self)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(text_embedding(config.vocab_size, config.hidden_size))
        self.model.embed_tokens.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, T], padded on the right -> logits [B, T, vocab]."""
        logits: Tensor = self.lm_head(self.model(input_ids=ids, use_cache=False).last_hidden_state)
        return logits


def build_talker(raw: dict[str, Any]) -> Any:
    """Transformers' Talker of a parsed `config.json`, its code predictor included, freshly drawn."""
    config = Qwen3OmniMoeConfig.from_dict(raw).talker_config
    for part in (config, config.text_config, config.code_predictor_config):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "eager"
    talker = Qwen3OmniMoeTalkerForConditionalGeneration(config)
    widen(talker)
    return talker


@torch.no_grad()
def widen(module: nn.Module) -> None:
    """Redraw matrices for narrow layers: N(0, 1 / fan in) instead of the published 0.02, tables N(0, 0.25)."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        spread = 0.25 if "embed" in name else 1 / math.sqrt(parameter.shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            spread *= 0.5  # branches added to the residual stream
        parameter.normal_(0.0, spread)
