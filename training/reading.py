"""How the teacher reads an answer aloud: words that form no phrase as a list, all others as one sentence.

In a list each word is said as if it stood alone, with a short pause behind it. Run together, such words sound otherwise
beside each neighbour, which is harder to learn and to understand.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby

import numpy as np

from training.alignment import PAUSE
from training.domain import ONES, SPOKEN_WORDS, number
from training.pace import LEAD, TAIL, speak_in_frames
from training.teacher import FRAME, SAMPLE_RATE, Speech, speak

_DIGITS = frozenset(ONES[:10])
_WORDS = frozenset(SPOKEN_WORDS)
_NUMBERS = frozenset(number(value) for value in range(1000))
# Seconds around a word that are kept with it, and in which they fade in and out.
_BEFORE, _BEHIND, _FADE = 0.03, 0.06, 0.005


def read(sentence: str, voice: str) -> Speech:
    """An answer as the teacher reads it, at its own pace. Raises what `speak` does."""
    return read_list(sentence, voice) if is_list(sentence) else speak(sentence, voice)


def read_in_frames(sentence: str, voice: str) -> Speech:
    """An answer as the teacher reads it, at the codec's pace. Raises what `speak_in_frames` does."""
    return read_list(sentence, voice) if is_list(sentence) else speak_in_frames(sentence, voice)


def is_list(sentence: str) -> bool:
    """Whether it is words of the domain in any order: neither digits in turn nor one number."""
    words = sentence.split()
    return len(words) > 1 and _WORDS.issuperset(words) and not _DIGITS.issuperset(words) and sentence not in _NUMBERS


def read_list(sentence: str, voice: str) -> Speech:
    """Words one by one: each begins with a codec frame, and is the same wherever it stands."""
    quiet = [np.zeros(frames * FRAME, np.float32) for frames in (LEAD, TAIL)]
    words = [_alone(word, voice) for word in sentence.split()]
    samples = np.concatenate([quiet[0], *(word.samples for word in words), quiet[1]])
    phones, at = [(PAUSE, LEAD * FRAME / SAMPLE_RATE)], LEAD * FRAME
    for word in words:
        phones += [(phone, round(at / SAMPLE_RATE + end, 3)) for phone, end in word.phones]
        at += len(word.samples)
    return Speech(samples, [*phones, (PAUSE, len(samples) / SAMPLE_RATE)])


@cache
def _alone(word: str, voice: str) -> Speech:
    """A word in the middle of a list, with the quiet around it; whole frames."""
    speech = speak(f"{word}, {word}, {word}", voice)
    ends = [end for _, end in speech.phones]
    runs = groupby(range(len(ends)), lambda place: speech.phones[place][0] == PAUSE)
    said = [list(places) for pause, places in runs if not pause]
    if len(said) != 3:
        raise RuntimeError(f"flite said {speech.phones} for three times {word!r}")
    start = ends[said[1][0] - 1] - _BEFORE
    part = speech.samples[round(start * SAMPLE_RATE) : round((ends[said[1][-1]] + _BEHIND) * SAMPLE_RATE)].copy()
    fade = np.linspace(0, 1, round(_FADE * SAMPLE_RATE), dtype=np.float32)
    part[: len(fade)] *= fade
    part[-len(fade) :] *= fade[::-1]
    samples = np.pad(part, (0, -len(part) % FRAME))
    phones = [(speech.phones[place][0], round(ends[place] - start, 3)) for place in said[1]]
    return Speech(samples, [(PAUSE, _BEFORE), *phones, (PAUSE, len(samples) / SAMPLE_RATE)])
