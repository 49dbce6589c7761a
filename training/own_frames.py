"""The trained Talker's own frames in place of the teacher's: what the decoder has to speak from in the end."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch

from training.checkpoints import load_state, seed_step, weights_of
from training.code_bank import Frames, build_own_bank
from training.domain import Sample
from training.rows import SpeechExample
from training.spoken_examples import SpokenExamples
from training.talker_batch import Batch
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from training.train_talker import TalkerTrainee
from triptych.models.qwen3_omni.config import parse_config

BATCH, SEED = 16, 11


def own_frames(work: Path, utterances: list[tuple[str, str]]) -> list[Frames]:
    """Frames [T, groups] of (sentence, voice) pairs as the Talker under `work` says them, teacher forced.

    Made on first use. Raises FileNotFoundError where the Talker was never trained.
    """
    path = work / "own_frames.npz"
    if not path.exists():
        _make(work, utterances, path)
    with np.load(path) as saved:
        return np.split(saved["codes"], saved["ends"][:-1])


@torch.no_grad()
def _make(work: Path, utterances: list[tuple[str, str]], path: Path) -> None:
    state = load_state(work / "talker" / "state.pt")
    if state is None:
        raise FileNotFoundError(f"{work / 'talker' / 'state.pt'} does not exist; train the Talker first")
    tokenizer = build_tokenizer()
    raw = tiny_config(tokenizer)
    config = parse_config(raw)
    trainee = TalkerTrainee(raw)
    trainee.load_state_dict(weights_of(state))
    trainee.eval()
    examples = SpokenExamples(build_own_bank(work), tokenizer, config)
    found: list[Frames] = [np.zeros((0, trainee.groups), np.int16)] * len(utterances)
    by_length = sorted(range(len(utterances)), key=lambda place: len(utterances[place][0]))
    for start in range(0, len(by_length), BATCH):
        seed_step(SEED, start)
        places = by_length[start : start + BATCH]
        chosen = [_example(examples, *utterances[place]) for place in places]
        batch = Batch(chosen, trainee.end, config.tts_pad_token_id)
        said = trainee.own_frames(batch, in_turn=True).to(torch.int16).numpy()
        ends = np.cumsum([len(example.frames) + 1 for example in chosen])
        for place, part in zip(places, np.split(said, ends[:-1]), strict=True):
            found[place] = part[:-1]  # the last is in place of the end
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, codes=np.concatenate(found), ends=np.cumsum([len(part) for part in found]))
    os.replace(partial, path)


def _example(examples: SpokenExamples, sentence: str, voice: str) -> SpeechExample:
    question = random.choice(("say: {}", "say {}", "repeat: {}")).format(sentence)
    sample = Sample(kind="repeat", key=sentence, question=question, answer=sentence)
    return examples.example(sample, question, sentence, voice)
