"""Teach the trained Thinker to hear and to see: its encoders and its text decoder together. Resumable by step."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3OmniMoeConfig, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from training.checkpoints import load_state, save_state, seed_step
from training.domain import COLOURS, ONES, SHAPES, TENS, Split, draw, draw_sum, typed
from training.log import TrainingLog
from training.media import MediaSample, picture_sample, spoken_sample
from training.naming import Names
from training.parts import widen
from training.pictures import patches
from training.schedule import cosine, step_generator
from training.speech_store import SpeechStore, build_store
from training.teacher import SAMPLE_RATE, VOICES, Waveform
from training.tiny_config import PREPROCESSOR, tiny_config
from training.tokenizer import build_tokenizer
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.synthetic_tokenizer import token_id
from triptych.models.qwen3_omni.video_features import second_per_grid

PEAK_RATE, SEED = 1e-3, 7
WRITTEN, SPOKEN, SEEN = 8, 10, 11  # samples of a step
QUESTIONS: dict[Split, int] = {"train": 6000, "held_out": 200}
SUMS = 0.6  # of the written ones
NAMING = 0.5  # weight of the encoders' auxiliary losses
SHOWN = {*COLOURS, *SHAPES, *ONES, *TENS[2:], "hundred"}  # what a picture can show, in words
_RATE = 16_000
_IGNORED = -100
_HEARD_OR_READ = ("written", "spoken")


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
        turn.words = [word_id(self.tokenizer, word) for word in sample.answer.split() if word in SHOWN]
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
            labels += [_IGNORED] * len(asked) + answered + [_IGNORED] * len(newline)
        return Turn(ids, labels, kind=kind)


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """The token of a word inside a sentence. Raises ValueError for a word of several tokens."""
    [found] = tokenizer.encode(f" {word}").ids
    return found


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
        self.labels = torch.full((len(turns), longest), _IGNORED)
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


def build_thinker(raw: dict[str, Any], text: dict[str, Tensor]) -> Any:
    """Transformers' whole Thinker: fresh encoders, and the text decoder as `train_thinker` left it."""
    config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config
    for part in (config, config.text_config, config.audio_config, config.vision_config):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "eager"
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    for encoder in (thinker.model.audio_tower, thinker.model.visual):
        widen(encoder)
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    missing, unexpected = thinker.load_state_dict(state, strict=False)
    strays = [name for name in missing if not name.startswith(("model.audio_tower.", "model.visual."))]
    if strays or unexpected:
        raise ValueError(f"the text decoder's state does not fit: {[*strays, *unexpected][:3]}")
    thinker.model.language_model.embed_tokens.weight.requires_grad_(False)
    return thinker


@torch.no_grad()
def evaluate(thinker: Any, examples: SenseExamples, pad: int, count: int) -> dict[str, float]:
    """Share of held-out answers of which every token is the likeliest, by kind; `count` samples of each sense."""
    thinker.eval()
    rng = random.Random(0)
    right: dict[str, list[bool]] = {}
    for draw_one in (examples.written, examples.spoken, examples.seen):
        turns = [draw_one(rng) for _ in range(count)]
        for start in range(0, count, 10):
            batch = SenseBatch(turns[start : start + 10], pad)
            likeliest = thinker(**batch.inputs, use_cache=False).logits.argmax(-1)
            good = ((likeliest == batch.labels) | (batch.labels == _IGNORED)).all(1)
            for kind, fine in zip(batch.kinds, good.tolist(), strict=True):
                right.setdefault(kind, []).append(fine)
    thinker.train()
    return {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}


def of_one_length(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Written, spoken, pictures and videos apart: each sense is several times as long as the one before it."""
    senses: dict[str, list[Turn]] = {}
    for turn in turns:
        sense = turn.kind if turn.kind in _HEARD_OR_READ else "video" if turn.video else "picture"
        senses.setdefault(sense, []).append(turn)
    return list(senses.values())


@contextmanager
def encoder_rows(thinker: Any) -> Iterator[list[Tensor]]:
    """The rows [N, hidden] that the encoders make inside."""
    found: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(output.pooler_output)

    hooks = [part.register_forward_hook(keep) for part in (thinker.model.audio_tower, thinker.model.visual)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def losses_of(thinker: Any, names: Names, batch: SenseBatch) -> tuple[Tensor, Tensor]:
    """The mean loss of each example's answers [B], and of the names of what a batch of one sense holds."""
    with encoder_rows(thinker) as rows:
        answers = answer_losses(thinker, batch)
    if not batch.words:
        return answers, answers.new_zeros(())
    parts = rows[0].split(batch.rows)
    return answers, names.heard(parts, batch.words) if batch.kinds[0] == "spoken" else names.seen(parts, batch.words)


def answer_losses(thinker: Any, batch: SenseBatch) -> Tensor:
    """The mean loss of each example's answers [B]."""
    logits = thinker(**batch.inputs, use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=_IGNORED, reduction="none")
    return each.view_as(batch.labels).sum(1) / (batch.labels != _IGNORED).sum(1)


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on; starts from the trained text decoder."""
    folder = work / "senses"
    tokenizer = build_tokenizer()
    raw = tiny_config(tokenizer)
    text = load_state(work / "thinker" / "state.pt")
    if text is None:
        raise FileNotFoundError(f"{work / 'thinker' / 'state.pt'} does not exist; train the thinker first")
    examples = SenseExamples(tokenizer, question_store(work, "train"), "train")
    held_out = SenseExamples(tokenizer, question_store(work, "held_out"), "held_out")
    pad = token_id(tokenizer, "<|endoftext|>")
    torch.manual_seed(SEED)
    thinker = build_thinker(raw, text["model"]).train()
    parameters = [parameter for parameter in thinker.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    table = thinker.model.language_model.embed_tokens.weight.detach()
    names = Names(table, [word_id(tokenizer, word) for word in SHOWN])
    step = 0
    if state := load_state(folder / "state.pt"):
        thinker.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        rng = random.Random(int(step_generator(SEED, step).integers(2**62)))
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, steps, PEAK_RATE, warm_up=200)
        turns = [examples.written(rng) for _ in range(WRITTEN)]
        turns += [examples.spoken(rng) for _ in range(SPOKEN)]
        turns += [examples.seen(rng) for _ in range(SEEN)]
        optimizer.zero_grad()
        by_sense: dict[str, list[float]] = {}
        for part in of_one_length(turns):
            losses, naming = losses_of(thinker, names, SenseBatch(part, pad))
            ((losses.sum() + NAMING * len(part) * naming) / len(turns)).backward()
            if part[0].words:
                named = "heard_names" if part[0].kind == "spoken" else "seen_names"
                by_sense.setdefault(named, []).append(naming.item())
            for turn, loss in zip(part, losses.tolist(), strict=True):
                by_sense.setdefault(turn.kind if turn.kind in _HEARD_OR_READ else "seen", []).append(loss)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        log.add(
            step,
            **{sense: sum(values) / len(values) for sense, values in by_sense.items()},
            gradient=norm.item(),
            seconds=time.monotonic() - started,
        )
        if step % 200 == 0 or step == steps:
            save_state(
                folder / "state.pt", {"step": step, "model": thinker.state_dict(), "optimizer": optimizer.state_dict()}
            )
        if step % 1000 == 0 or step == steps:
            report = {"step": step, "exact": evaluate(thinker, held_out, pad, 100)}
            with (folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")
            print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.work, arguments.steps)


if __name__ == "__main__":
    main()
