"""The speech that codec and Talker learn from: answers of the domain as the teacher reads them, at the codec's pace."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from training.domain import SMALL_TALK, SPOKEN_WORDS, Sample, Split, draw_long, samples, sentences
from training.phrasing import UNKNOWN
from training.reading import read_in_frames
from training.speech_store import SpeechStore, build_store
from training.teacher import VOICES

TRAIN_SENTENCES, HELD_OUT_SENTENCES = 33_000, 300
LONG_SENTENCES, LONG = 3_500, 18  # more of so many words, in training: the domain draws few, and they are lost first

LISTS, LIST_WORDS = 6_000, (3, 12)  # of so many words in any order: where most of its mistakes were
UNSEEN_SENTENCES = 1_600  # of the training split, but never taught to the Talker
COMMON, DRAWS = 3, 40_000  # answers that so many draws of the domain give so often are spoken in each voice

BY_HEART = tuple(dict.fromkeys([*(exchange.answer for exchange in SMALL_TALK), UNKNOWN]))


def speech_store(work: Path, split: Split = "train") -> SpeechStore:
    """The corpus of a split under `work`, made on first use. Each sentence is spoken once, the voices taking turns."""
    count = TRAIN_SENTENCES if split == "train" else HELD_OUT_SENTENCES
    chosen = sentences(count, split) + (long_sentences() if split == "train" else [])
    return build_store(work / f"speech_{split}", _in_turn(chosen), read_in_frames)


def by_heart_store(work: Path) -> SpeechStore:
    """Answers of closed lists in each voice, made on first use: their words are hardly in any other sentence."""
    return build_store(work / "speech_by_heart", _in_each(BY_HEART), read_in_frames)


def common_store(work: Path) -> SpeechStore:
    """Answers that the domain gives often in each voice, made on first use: of these the other has few like them."""
    counts = Counter(sample.answer for sample in samples(DRAWS, "train"))
    common = [answer for answer, count in counts.items() if count >= COMMON and answer not in BY_HEART]
    return build_store(work / "speech_common", _in_each(common), read_in_frames)


def unseen_store(work: Path) -> SpeechStore:
    """Sentences for the decoder to learn the Talker's mistakes from, made on first use. In what it was taught it makes
    a third of them."""
    chosen = sentences(TRAIN_SENTENCES + UNSEEN_SENTENCES, "train")[TRAIN_SENTENCES:]
    return build_store(work / "speech_unseen", _in_turn(chosen), read_in_frames)


def lists_store(work: Path) -> SpeechStore:
    """Words in any order, made on first use."""
    return build_store(work / "speech_lists", _in_turn(word_lists()), read_in_frames)


def _in_turn(chosen: Sequence[str]) -> list[tuple[str, str]]:
    names = list(VOICES)
    return [(sentence, names[index % len(names)]) for index, sentence in enumerate(chosen)]


def _in_each(chosen: Sequence[str]) -> list[tuple[str, str]]:
    return [(sentence, voice) for sentence in chosen for voice in VOICES]


def word_lists() -> list[str]:
    """Different lists of the domain's words in any order, of the training split; the same each time."""
    rng = random.Random("word lists")
    found: dict[str, None] = {}
    while len(found) < LISTS:
        words = " ".join(rng.choice(SPOKEN_WORDS) for _ in range(rng.randint(*LIST_WORDS)))
        if Sample(kind="repeat", key=words, question="", answer=words).split == "train":
            found[words] = None
    return list(found)


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
