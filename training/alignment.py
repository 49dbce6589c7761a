"""Which word, and which phone, the teacher says in each codec frame: what the Talker has to find in its text."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache

from training.teacher import FRAME, SAMPLE_RATE, speak

Phones = Sequence[tuple[str, float]]  # each with the second at which it ends
PAUSE = "pau"
PHONES = (
    "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh uw v w y z zh"
).split()


@cache
def phones_of(word: str, voice: str) -> tuple[str, ...]:
    """How a voice says a word that stands alone."""
    return tuple(phone for phone, _ in speak(word, voice).phones if phone != PAUSE)


def words_of_phones(said: Sequence[str], lexicon: Sequence[Sequence[str]]) -> list[int | None]:
    """The word that each phone of a sentence belongs to, by the phones of its words; None for pauses.

    In a sentence some words sound otherwise than alone ("a", "the"): what does not match goes to the word it lies in.
    """
    alone = [(phone, index) for index, phones in enumerate(lexicon) for phone in phones]
    sounding = [place for place, phone in enumerate(said) if phone != PAUSE]
    found: list[int | None] = [None] * len(said)
    matcher = SequenceMatcher(None, [said[place] for place in sounding], [phone for phone, _ in alone], autojunk=False)
    for _, start, end, first, last in matcher.get_opcodes():
        for place in range(start, end):
            # A stretch of another length is shared out evenly; one without a counterpart goes to the word before it.
            near = first + (place - start) * (last - first) // (end - start) if last > first else max(0, first - 1)
            found[sounding[place]] = alone[near][1]
    return found


def owners_of(sentence: str, voice: str, phones: Phones) -> list[int | None]:
    """The word (by spaces) of a sentence that each of its phones belongs to, None for pauses."""
    lexicon = [phones_of(word.strip(",:"), voice) for word in sentence.split()]
    return words_of_phones([phone for phone, _ in phones], lexicon)


def words_of_frames(sentence: str, voice: str, phones: Phones, frames: int) -> tuple[list[int | None], list[str]]:
    """Per codec frame the index of the word (by spaces) and the phone at its middle."""
    owners = owners_of(sentence, voice, phones)
    words: list[int | None] = []
    names: list[str] = []
    current = 0
    for frame in range(frames):
        middle = (frame + 0.5) * FRAME / SAMPLE_RATE
        while current < len(phones) - 1 and phones[current][1] < middle:
            current += 1
        words.append(owners[current] if phones[current][1] >= middle else None)
        names.append(phones[current][0])
    return words, names


def tokens_of_words(sentence: str, offsets: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Index of a word -> index of its first token, by the characters that each token covers."""
    starts, at = {}, 0
    for index, word in enumerate(sentence.split(" ")):
        starts[index] = next(token for token, (_, end) in enumerate(offsets) if at < end)
        at += len(word) + 1
    return starts
