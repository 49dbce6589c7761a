"""Teach the vision encoder alone to name what pictures and videos show, before the Thinker sees. Resumable by step.

Without the text decoder behind it, a step sees several times as many pictures in the same time.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

from training.checkpoints import resume, save_step, seed_step
from training.command import run_trainer
from training.domain import COLOURS, DIRECTIONS, ONES, SHAPES, TENS, Split
from training.log import TrainingLog
from training.media import MediaSample, picture_sample
from training.naming import Names
from training.parts import text_embedding, widen
from training.pictures import patches
from training.schedule import cosine, half_precision, set_rate, step_generator
from training.tiny_config import PREPROCESSOR, tiny_config
from training.tokenizer import build_tokenizer

PICTURES, VIDEOS = 40, 3  # of a step
PEAK_RATE, SEED = 2e-3, 11
SHOWN = {*COLOURS, *SHAPES, *ONES, *TENS[2:], *DIRECTIONS, "hundred"}  # what can be seen, in words


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """The token of a word inside a sentence. Raises ValueError for a word of several tokens."""
    [found] = tokenizer.encode(f" {word}").ids
    return found


def shown_words(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Tokens of the words of an answer that the picture itself shows."""
    return [word_id(tokenizer, word) for word in answer.replace("picture: ", "").split() if word in SHOWN]


def picture_names(tokenizer: Tokenizer) -> Names:
    """The losses of the encoders of a tokenizer's Thinker."""
    config = tiny_config(tokenizer)["thinker_config"]["text_config"]
    table = text_embedding(config["vocab_size"], config["hidden_size"])
    return Names(table, [word_id(tokenizer, word) for word in SHOWN])


def build_eyes(raw: dict[str, Any]) -> Any:
    """Transformers' vision encoder, freshly drawn."""
    config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config.vision_config
    config._attn_implementation = "sdpa"
    eyes = Qwen3OmniMoeVisionEncoder(config)
    widen(eyes)
    return eyes


def draw_pictures(rng: random.Random, split: Split, pictures: int, videos: int) -> list[MediaSample]:
    """So many pictures and videos."""
    found: dict[bool, list[MediaSample]] = {False: [], True: []}
    wanted = {False: pictures, True: videos}
    while any(len(found[kind]) < wanted[kind] for kind in found):
        sample = picture_sample(rng, split)
        if len(found[sample.is_video]) < wanted[sample.is_video]:
            found[sample.is_video].append(sample)
    return [*found[False], *found[True]]


class Seen:
    """Pictures and videos in one batch: patches [N, 1536], grids, rows and words of each."""

    def __init__(self, samples: list[MediaSample], tokenizer: Tokenizer) -> None:
        parts = [patches(sample.pictures) for sample in samples]
        self.pixels = torch.cat([pixels for pixels, _ in parts])
        self.grids = torch.tensor([grid for _, grid in parts])
        self.rows: list[int] = (self.grids.prod(-1) // PREPROCESSOR.merge_size**2).tolist()
        self.words = [shown_words(tokenizer, sample.answer) for sample in samples]

    def rows_of(self, eyes: Any) -> tuple[Tensor, ...]:
        """The encoder's rows [rows, hidden] of each."""
        with half_precision():
            rows: Tensor = eyes(self.pixels, grid_thw=self.grids).pooler_output
        return rows.float().split(self.rows)


@torch.no_grad()
def evaluate(eyes: Any, names: Names, tokenizer: Tokenizer, count: int = 100) -> dict[str, float]:
    """Share of held-out pictures and videos of which all words are named and no other."""
    eyes.eval()
    batch = Seen(draw_pictures(random.Random(0), "held_out", count, count // 4), tokenizer)
    right = [named == set(said) for named, said in zip(names.named(batch.rows_of(eyes)), batch.words, strict=True)]
    eyes.train()
    return {"picture": sum(right[:count]) / count, "video": sum(right[count:]) / (count // 4)}


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on."""
    folder = work / "eyes"
    tokenizer = build_tokenizer()
    names = picture_names(tokenizer)
    torch.manual_seed(SEED)
    eyes = build_eyes(tiny_config(tokenizer)).train()
    parameters = list(eyes.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step = resume(folder / "state.pt", eyes, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        set_rate(optimizer, cosine(step, steps, PEAK_RATE, warm_up=50))
        rng = random.Random(int(step_generator(SEED, step).integers(2**62)))
        batch = Seen(draw_pictures(rng, "train", PICTURES, VIDEOS), tokenizer)
        drawn = time.monotonic()
        loss = names.seen(batch.rows_of(eyes), batch.words)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        ended = time.monotonic()
        log.add(step, loss=loss.item(), gradient=norm.item(), drawing=drawn - started, seconds=ended - started)
        if step % 100 == 0 or step == steps:
            save_step(folder / "state.pt", step, eyes, optimizer)
        if step % 500 == 0 or step == steps:
            log.evaluated(step, **evaluate(eyes, names, tokenizer))


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=1_000)
