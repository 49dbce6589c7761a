"""Examples of every sense: written, spoken and seen questions with answers, and batches of them for Transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import WhisperFeatureExtractor

from training.domain import Split, draw, draw_sum, typed
from training.media import MediaSample, picture_sample, spoken_sample
from training.pictures import patches
from training.speech_store import SpeechStore, build_store
from training.teacher import SAMPLE_RATE, VOICES, Waveform
from training.tiny_config import PREPROCESSOR
from training.train_eyes import shown_words
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.video_features import second_per_grid

QUESTIONS: dict[Split, int] = {"train": 6000, "held_out": 200}
SUMS = 0.6  # of the written ones
IGNORED = -100
_RATE = 16_000


@dataclass(slots=True)
class Turn:
    """One example before padding: ids with placeholders, labels, and what stands behind the placeholders."""

    ids: list[int]
    labels: list[int]
    sound: Waveform | None = None
    pixels: Tensor | None = None
    grid: tuple[int, int, int] | None = None
    video: bool = False
    kind: str = "written"
    words: list[int] = field(default_factory=list)  # what is heard, or which words of the domain are shown


def question_store(work: Path, split: Split) -> SpeechStore:
    """Spoken questions of a split, each in one of the voices, made on first use."""
    rng = random.Random(f"questions:{split}")
    found: dict[str, None] = {}
    while len(found) < QUESTIONS[split]:
        found[spoken_sample(rng, split).spoken] = None
    names = list(VOICES)
    pairs = [(question, names[index % len(names)]) for index, question in enumerate(found)]
    return build_store(work / f"questions_{split}", pairs)


@cache
def _extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, hop_length=160, n_fft=400, chunk_length=30)


class SenseExamples:
    """Examples of a split in any form: written, spoken, seen."""

    def __init__(self, tokenizer: Tokenizer, store: SpeechStore, split: Split) -> None:
        self.tokenizer, self.store, self.split = tokenizer, store, split
        self.said: dict[str, list[int]] = {}
        for index, utterance in enumerate(store.utterances):
            self.said.setdefault(utterance.sentence, []).append(index)

    def written(self, rng: random.Random) -> Turn:
        sample = draw_sum(rng, self.split) if rng.random() < SUMS else draw(rng, self.split)
        return self._turn(rng, sample.history, typed(rng, sample.question), sample.answer, "written")

    def spoken(self, rng: random.Random) -> Turn:
        while (sample := spoken_sample(rng, self.split)).spoken not in self.said:
            pass
        speech = self.store.waveform(rng.choice(self.said[sample.spoken]))
        sound = soxr.resample(speech, SAMPLE_RATE, _RATE)
        quiet = [np.zeros(int(rng.uniform(0, 0.25) * _RATE), dtype=np.float32) for _ in range(2)]
        sound = np.concatenate([quiet[0], sound, quiet[1]]) * rng.uniform(0.4, 1.4)
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound)) * rng.uniform(0, 0.004)
        sound = np.clip(sound + noise, -1, 1).astype(np.float32)
        text = f"<|audio_start|>{'<|audio_pad|>' * sound_tokens(len(sound))}<|audio_end|>"
        turn = self._turn(rng, sample.history, text, sample.answer, "spoken")
        turn.sound, turn.words = sound, self.tokenizer.encode(sample.spoken).ids
        return turn

    def seen(self, rng: random.Random) -> Turn:
        sample: MediaSample = picture_sample(rng, self.split)
        pixels, grid = patches(sample.pictures)
        pad = "<|video_pad|>" if sample.is_video else "<|image_pad|>"
        count = grid[0] * grid[1] * grid[2] // PREPROCESSOR.merge_size**2
        media = f"<|vision_start|>{pad * count}<|vision_end|>"
        question = typed(rng, sample.question)
        text = media + question if rng.random() < 0.7 else question + media
        turn = self._turn(rng, sample.history, text, sample.answer, sample.kind)
        turn.pixels, turn.grid, turn.video = pixels, grid, sample.is_video
        turn.words = shown_words(self.tokenizer, sample.answer)
        return turn

    def _turn(self, rng: random.Random, history: Sequence[Any], text: str, answer: str, kind: str) -> Turn:
        ids: list[int] = []
        labels: list[int] = []
        for question, reply in [*((typed(rng, q), a) for q, a in history), (text, answer)]:
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            asked = self.tokenizer.encode(prompt).ids
            answered = self.tokenizer.encode(f"{reply}<|im_end|>").ids
            newline = self.tokenizer.encode("\n").ids
            ids += asked + answered + newline
            labels += [IGNORED] * len(asked) + answered + [IGNORED] * len(newline)
        return Turn(ids, labels, kind=kind)


def sound_tokens(samples: int) -> int:
    """Audio tokens of so many samples at 16 kHz: 13 for each whole second of 100 feature frames, and the rest."""
    frames = samples // 160
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // 100 * 13


class SenseBatch:
    """Examples padded on the right, with everything that Transformers' Thinker takes."""

    def __init__(self, turns: Sequence[Turn], pad: int) -> None:
        longest = max(len(turn.ids) for turn in turns)
        ids = torch.full((len(turns), longest), pad)
        mask = torch.zeros(len(turns), longest, dtype=torch.long)
        self.labels = torch.full((len(turns), longest), IGNORED)
        for index, turn in enumerate(turns):
            ids[index, : len(turn.ids)] = torch.tensor(turn.ids)
            mask[index, : len(turn.ids)] = 1
            self.labels[index, : len(turn.ids) - 1] = torch.tensor(turn.labels[1:])
        self.inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        self.kinds = [turn.kind for turn in turns]
        self.words = [turn.words for turn in turns if turn.words]
        self.rows = [self.count_rows(turn) for turn in turns if turn.words]
        sounds = [turn.sound for turn in turns if turn.sound is not None]
        if sounds:
            features = _extractor()(
                sounds, sampling_rate=_RATE, padding=True, truncation=False, return_attention_mask=True,
                return_tensors="pt",
            )  # fmt: skip
            self.inputs["input_features"] = features["input_features"]
            # Beside a longer clip, the extractor counts a last frame that the clip alone would not have.
            frames = torch.tensor([len(sound) // 160 for sound in sounds])
            width = features["input_features"].shape[-1]
            self.inputs["feature_attention_mask"] = (torch.arange(width) < frames[:, None]).long()
        for video, values, grids in (
            (False, "pixel_values", "image_grid_thw"),
            (True, "pixel_values_videos", "video_grid_thw"),
        ):
            some = [turn for turn in turns if turn.pixels is not None and turn.video == video]
            if some:
                self.inputs[values] = torch.cat([turn.pixels for turn in some if turn.pixels is not None])
                self.inputs[grids] = torch.tensor([turn.grid for turn in some])
                if video:
                    self.inputs["video_second_per_grid"] = torch.full(
                        (len(some),), second_per_grid(PREPROCESSOR, MediaOptions())
                    )

    @staticmethod
    def count_rows(turn: Turn) -> int:
        """Rows of the encoder of a turn's sound or pictures."""
        if turn.sound is not None:
            return sound_tokens(len(turn.sound))
        assert turn.grid is not None
        return math.prod(turn.grid) // PREPROCESSOR.merge_size**2
