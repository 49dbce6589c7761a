"""The speech that codec and Talker learn from: answers of the domain in the teacher's voices, at the codec's pace."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from training.domain import SMALL_TALK, Split, draw_long, sentences
from training.pace import speak_in_frames
from training.phrasing import UNKNOWN
from training.speech_store import SpeechStore, build_store
from training.teacher import VOICES

TRAIN_SENTENCES, HELD_OUT_SENTENCES = 28_000, 300
LONG_SENTENCES, LONG = 2_000, 18  # more of so many words, in training: the domain draws few, and they are lost first

BY_HEART = tuple(dict.fromkeys([*(exchange.answer for exchange in SMALL_TALK), UNKNOWN]))


def speech_store(work: Path, split: Split = "train") -> SpeechStore:
    """The corpus of a split under `work`, made on first use. Each sentence is spoken once, the voices taking turns."""
    count = TRAIN_SENTENCES if split == "train" else HELD_OUT_SENTENCES
    names = list(VOICES)
    chosen = sentences(count, split) + (long_sentences() if split == "train" else [])
    pairs = [(sentence, names[index % len(names)]) for index, sentence in enumerate(chosen)]
    return build_store(work / f"speech_{split}", pairs, speak_in_frames)


def by_heart_store(work: Path) -> SpeechStore:
    """Answers of closed lists in each voice, made on first use: their words are hardly in any other sentence."""
    pairs = [(answer, voice) for answer in BY_HEART for voice in VOICES]
    return build_store(work / "speech_by_heart", pairs, speak_in_frames)


def long_sentences() -> list[str]:
    """Different nonsense sentences of many words, of the training split; the same each time."""
    rng = random.Random("long sentences")
    found: dict[str, None] = {}
    while len(found) < LONG_SENTENCES:
        sentence = draw_long(rng, "train").answer
        if len(sentence.split()) >= LONG:
            found[sentence] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work: Path = parser.parse_args().work
    for split in ("train", "held_out"):
        store = speech_store(work, split)
        seconds = sum(utterance.samples for utterance in store.utterances) / 24_000
        print(f"{split}: {len(store)} utterances, {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
