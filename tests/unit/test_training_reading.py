"""How the teacher reads: which words are a list, and that a word of a list is the same wherever it stands."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest

from training.domain import samples
from training.pace import LEAD, TAIL
from training.reading import is_list, read, read_in_frames
from training.teacher import FRAME, SAMPLE_RATE

with_flite = pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")


@pytest.mark.parametrize("sentence", ["roof twenty", "one hundred seven left", "five six ten", "hundred forty"])
def test_words_that_form_no_phrase_are_a_list(sentence: str) -> None:
    assert is_list(sentence)


@pytest.mark.parametrize(
    "sentence",
    ["roof", "four zero seven", "two hundred forty two", "seven plus two is nine", "a red circle", "red, green"],
)
def test_phrases_are_read_as_one(sentence: str) -> None:
    assert not is_list(sentence)


def test_nothing_but_what_was_to_be_repeated_is_a_list() -> None:
    kinds = {sample.kind for sample in samples(3000, "train") if is_list(sample.answer)}
    assert kinds == {"repeat"}


@with_flite
@pytest.mark.parametrize("voice", ["rms", "slt"])
def test_a_word_of_a_list_is_the_same_frames_wherever_it_stands(voice: str) -> None:
    once, again = (read(sentence, voice) for sentence in ("roof seven left", "left green roof"))
    assert len(once.samples) % FRAME == 0 and once.phones[-1] == ("pau", len(once.samples) / SAMPLE_RATE)
    word = once.samples[LEAD * FRAME :]
    length = next(n for n in range(FRAME, len(word), FRAME) if np.array_equal(word[:n], _end(again.samples, n)))
    assert 2 * FRAME < length < 12 * FRAME and np.abs(word[:length]).max() > 0.1


def _end(samples: np.ndarray, length: int) -> np.ndarray:
    return samples[len(samples) - TAIL * FRAME - length : len(samples) - TAIL * FRAME]


@with_flite
def test_phones_of_a_list_are_when_they_sound() -> None:
    speech = read_in_frames("up hundred", "slt")
    assert [phone for phone, _ in speech.phones if phone != "pau"] == "ah p hh ah n d r ax d".split()
    ends = [end for _, end in speech.phones]
    assert ends == sorted(ends)
    loud = [np.abs(speech.samples[round(a * SAMPLE_RATE) : round(b * SAMPLE_RATE)]).max() for a, b in pairwise(ends)]
    vowels = [level for (phone, _), level in zip(speech.phones[1:], loud, strict=True) if phone in ("ah", "ax")]
    assert min(vowels) > 0.05
