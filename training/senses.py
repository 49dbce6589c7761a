"""Examples of every sense: written, spoken and seen questions with answers, and batches of them for Transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.domain import Split
from training.media import MediaSample, picture_sample, spoken_sample
from training.naming import Covered
from training.phrasing import phrased, system, written
from training.pictures import coverage, patches
from training.sounds import features, recorded, sound_rows
from training.speech_store import SpeechStore, build_store
from training.teacher import VOICES, Waveform, speak
from training.tiny_config import PREPROCESSOR
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.video_features import second_per_grid

QUESTIONS: dict[Split, int] = {"train": 20_000, "held_out": 200}
FREQUENT = 0.3  # of the spoken ones are drawn as often as they are asked; of the others any is as likely as another
IGNORED = -100


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
    words: list[int] = field(default_factory=list)  # what is heard
    covered: Covered = ()  # what is seen, and where


def spoken_questions(split: Split) -> list[MediaSample]:
    """The questions of a split that are spoken, each said once."""
    rng = random.Random(f"questions:{split}")
    found: dict[str, MediaSample] = {}
    while len(found) < QUESTIONS[split]:
        sample = spoken_sample(rng, split)
        found.setdefault(sample.spoken, sample)
    return list(found.values())


def question_store(work: Path, split: Split) -> SpeechStore:
    """Spoken questions of a split, each in one of the voices, made on first use."""
    names = list(VOICES)
    pairs = [(sample.spoken, names[index % len(names)]) for index, sample in enumerate(spoken_questions(split))]
    return build_store(work / f"questions_{split}", pairs, speak)


class SenseExamples:
    """Examples of a split in any form: written, spoken, seen."""

    def __init__(self, tokenizer: Tokenizer, store: SpeechStore, split: Split) -> None:
        self.tokenizer, self.store, self.split = tokenizer, store, split
        self.questions = spoken_questions(split)
        self.said = {utterance.sentence: index for index, utterance in enumerate(store.utterances)}

    def written(self, rng: random.Random) -> Turn:
        sample = written(rng, self.split)
        return self._turn(rng, sample.history, phrased(rng, sample.question), sample.answer, "written")

    def spoken(self, rng: random.Random) -> Turn:
        sample = rng.choice(self.questions)
        if sample.history or rng.random() < FREQUENT:
            while (sample := spoken_sample(rng, self.split)).spoken not in self.said:
                pass
        speech = self.store.waveform(self.said[sample.spoken])
        sound = recorded(speech, rng)
        text = f"<|audio_start|>{'<|audio_pad|>' * sound_rows(len(sound))}<|audio_end|>"
        turn = self._turn(rng, sample.history, text, sample.answer, "spoken")
        turn.sound, turn.words = sound, self.tokenizer.encode(sample.spoken).ids
        return turn

    def seen(self, rng: random.Random) -> Turn:
        sample: MediaSample = picture_sample(rng, self.split)
        pixels, grid = patches(sample.pictures)
        pad = "<|video_pad|>" if sample.is_video else "<|image_pad|>"
        count = grid[0] * grid[1] * grid[2] // PREPROCESSOR.merge_size**2
        media = f"<|vision_start|>{pad * count}<|vision_end|>"
        question = phrased(rng, sample.question)
        text = media + question if rng.random() < 0.7 else question + media
        turn = self._turn(rng, sample.history, text, sample.answer, sample.kind)
        turn.pixels, turn.grid, turn.video = pixels, grid, sample.is_video
        turn.covered = coverage(sample.pictures, grid)
        return turn

    def _turn(self, rng: random.Random, history: Sequence[Any], text: str, answer: str, kind: str) -> Turn:
        begin = system(rng)
        ids = self.tokenizer.encode(f"<|im_start|>system\n{begin}<|im_end|>\n").ids if begin else []
        labels = [IGNORED] * len(ids)
        for question, reply in [*((phrased(rng, q), a) for q, a in history), (text, answer)]:
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            asked = self.tokenizer.encode(prompt).ids
            answered = self.tokenizer.encode(f"{reply}<|im_end|>").ids
            newline = self.tokenizer.encode("\n").ids
            ids += asked + answered + newline
            labels += [IGNORED] * len(asked) + answered + [IGNORED] * len(newline)
        return Turn(ids, labels, kind=kind)


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
        self.covered = [turn.covered for turn in turns if turn.covered]
        self.rows = [self.count_rows(turn) for turn in turns if turn.words or turn.covered]
        sounds = [turn.sound for turn in turns if turn.sound is not None]
        if sounds:
            self.inputs["input_features"], self.inputs["feature_attention_mask"] = features(sounds)
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
            return sound_rows(len(turn.sound))
        assert turn.grid is not None
        return math.prod(turn.grid) // PREPROCESSOR.merge_size**2
