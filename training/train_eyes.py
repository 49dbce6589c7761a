"""Teach the vision encoder alone to name what pictures and videos show, before the Thinker sees. Resumable by step.

Without the text decoder behind it, a step sees several times as many pictures in the same time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

from training.command import run_trainer
from training.domain import Split
from training.encoder_loop import train_encoder
from training.media import MediaKind, MediaSample, picture_sample
from training.naming import SHOWN, Names, names_of
from training.parts import widen
from training.pictures import coverage, patches
from training.schedule import half_precision
from training.tiny_config import PREPROCESSOR, tiny_config
from training.tokenizer import build_tokenizer

SHAPES, FIGURES, VIDEOS = 32, 64, 2  # of a step
SEED = 11


def shown_words(answer: str) -> set[str]:
    """The words of an answer that the picture itself shows."""
    return SHOWN & set(answer.replace("picture: ", "").split())


def build_eyes(raw: dict[str, Any]) -> Any:
    """Transformers' vision encoder, freshly drawn."""
    config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config.vision_config
    config._attn_implementation = "sdpa"
    eyes = Qwen3OmniMoeVisionEncoder(config)
    widen(eyes)
    return eyes


def draw_pictures(rng: random.Random, split: Split, shapes: int, figures: int, videos: int) -> list[MediaSample]:
    """So many of each."""
    kinds: list[MediaKind] = [*["picture"] * shapes, *["figure"] * figures, *["video"] * videos]
    return [picture_sample(rng, split, kind) for kind in kinds]


class Seen:
    """Pictures and videos in one batch: patches [N, 1536], grids, and what each shows where."""

    def __init__(self, samples: list[MediaSample]) -> None:
        parts = [patches(sample.pictures) for sample in samples]
        self.pixels = torch.cat([pixels for pixels, _ in parts])
        self.grids = torch.tensor([grid for _, grid in parts])
        self.rows: list[int] = (self.grids.prod(-1) // PREPROCESSOR.merge_size**2).tolist()
        self.covered = [coverage(sample.pictures, grid) for sample, (_, grid) in zip(samples, parts, strict=True)]

    def rows_of(self, eyes: Any) -> tuple[Tensor, ...]:
        """The encoder's rows [rows, hidden] of each."""
        with half_precision():
            rows: Tensor = eyes(self.pixels, grid_thw=self.grids).pooler_output
        return rows.float().split(self.rows)


@torch.no_grad()
def evaluate(eyes: Any, names: Names, count: int = 100) -> dict[str, float]:
    """Share of held-out shapes, figures and videos of which all words are named and no other."""
    eyes.eval()
    drawn = draw_pictures(random.Random(0), "held_out", count, count, count // 4)
    right: dict[str, list[bool]] = {}
    for sample, named in zip(drawn, names.named(Seen(drawn).rows_of(eyes)), strict=True):
        right.setdefault(sample.kind, []).append(named == shown_words(sample.answer))
    eyes.train()
    return {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on."""
    tokenizer = build_tokenizer()
    names = names_of(tokenizer)
    torch.manual_seed(SEED)
    eyes = build_eyes(tiny_config(tokenizer)).train()
    train_encoder(
        work / "eyes",
        eyes,
        steps,
        SEED,
        draw=lambda rng: Seen(draw_pictures(rng, "train", SHAPES, FIGURES, VIDEOS)),
        loss_of=lambda batch: names.seen(batch.rows_of(eyes), batch.covered),
        evaluate=lambda: evaluate(eyes, names),
    )


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=1_000)
