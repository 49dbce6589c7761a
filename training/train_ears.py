"""Teach the audio encoder alone to spell what the teacher says, before the Thinker hears. Resumable by step.

Without the text decoder behind it, a step hears several times as much in the same time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from training.command import run_trainer
from training.domain import Split
from training.encoder_loop import train_encoder
from training.naming import Names, names_of
from training.parts import widen
from training.schedule import half_precision
from training.scoring import distance
from training.senses import question_store
from training.sounds import features, recorded, sound_rows
from training.speech import speech_store
from training.speech_store import SpeechStore
from training.teacher import FRAME, Waveform
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer

CLIPS, LONGEST = 24, 75 * FRAME  # of a step; samples of a clip
QUESTIONS = 0.4  # of the clips; the others are answers
SEED = 13


def build_ears(raw: dict[str, Any]) -> Any:
    """Transformers' audio encoder, freshly drawn."""
    config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config.audio_config
    config._attn_implementation = "sdpa"
    ears = Qwen3OmniMoeAudioEncoder(config)
    widen(ears)
    return ears


class Heard:
    """Clips of one batch: their features, the encoder's rows of each, and what is said."""

    def __init__(self, clips: Sequence[tuple[Waveform, str]], tokenizer: Tokenizer) -> None:
        found, mask = features([sound for sound, _ in clips])
        self.lengths = mask.sum(1)
        self.features = found.permute(0, 2, 1)[mask.bool()].permute(1, 0)
        self.rows = [sound_rows(len(sound)) for sound, _ in clips]
        self.words = [tokenizer.encode(sentence).ids for _, sentence in clips]

    def rows_of(self, ears: Any) -> tuple[Tensor, ...]:
        """The encoder's rows [rows, hidden] of each."""
        with half_precision():
            rows: Tensor = ears(self.features, feature_lens=self.lengths).pooler_output
        return rows.float().split(self.rows)


class Speech:
    """What a split has of the teacher's speech: questions and answers."""

    def __init__(self, work: Path, split: Split) -> None:
        self.stores = (question_store(work, split), speech_store(work, split))

    def draw(self, rng: random.Random, count: int) -> list[tuple[Waveform, str]]:
        """Clips and what they say, none longer than LONGEST."""
        found: list[tuple[Waveform, str]] = []
        while len(found) < count:
            store: SpeechStore = self.stores[rng.random() >= QUESTIONS]
            index = rng.randrange(len(store))
            if store.utterances[index].samples <= LONGEST:
                found.append((recorded(store.waveform(index), rng), store.utterances[index].sentence))
        return found


@torch.no_grad()
def evaluate(ears: Any, names: Names, tokenizer: Tokenizer, speech: Speech, count: int = 100) -> dict[str, float]:
    """Wrong tokens per hundred over held-out clips, and the share of clips without one."""
    ears.eval()
    batch = Heard(speech.draw(random.Random(0), count), tokenizer)
    wrong = [distance(said, spelt) for said, spelt in zip(batch.words, names.spelt(batch.rows_of(ears)), strict=True)]
    ears.train()
    tokens = sum(len(said) for said in batch.words)
    return {"errors": round(100 * sum(wrong) / tokens, 2), "whole": round(sum(not one for one in wrong) / count, 4)}


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on."""
    tokenizer = build_tokenizer()
    names = names_of(tokenizer)
    speech, held_out = Speech(work, "train"), Speech(work, "held_out")
    torch.manual_seed(SEED)
    ears = build_ears(tiny_config(tokenizer)).train()
    train_encoder(
        work / "ears",
        ears,
        steps,
        SEED,
        draw=lambda rng: Heard(speech.draw(rng, CLIPS), tokenizer),
        loss_of=lambda batch: names.heard(batch.rows_of(ears), batch.words),
        evaluate=lambda: evaluate(ears, names, tokenizer, held_out),
    )


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=1_500)
