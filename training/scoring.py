"""Scoring of speech by its transcript: words as the domain spells them, and their error rate.

A recogniser writes "42", "$40", "color" or "equals" where the domain says "forty two", "forty dollars", "colour" and
"is". Both sides are folded to the domain's words first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from training.domain import ONES, number

_SAME = {
    "color": "colour", "colors": "colour", "colours": "colour", "grey": "gray", "equals": "is", "equal": "is",
    "ok": "okay", "ill": "i will", "well": "well", "im": "i am", "its": "it is", "youre": "you are", "oh": "zero",
}  # fmt: skip
_SIGNS = {"+": "plus", "=": "is", "\u00d7": "times", "*": "times", "\u2013": "-", "\u2212": "-"}


def fold(text: str, *, spelled: bool = False) -> list[str]:
    """Words of a transcript. `spelled` reads numerals of two or three digits digit by digit."""
    text = text.lower()
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word if word == "-" else f" {word} ")
    text = re.sub(r"(\d),(?=\d{3}\b)", r"\1", text)
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", r"\1", text)
    text = re.sub(r"(?<=\d)\s*-\s*(?=\d)", " " if spelled else " minus ", text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=\d)", " times ", text).replace("'", "").replace("\u2019", "")
    text = re.sub(r"\d+", lambda match: f" {_read(match.group(), spelled)} ", text)
    text = re.sub(r"[^a-z ]", " ", text).replace("good bye", "goodbye").replace("hundred and ", "hundred ")
    return " ".join(_SAME.get(word, word) for word in text.split()).split()


def _read(numeral: str, spelled: bool) -> str:
    if spelled or len(numeral) > 3 or (numeral[0] == "0" and len(numeral) > 1):
        return " ".join(ONES[int(digit)] for digit in numeral)
    return number(int(numeral))


def distance(reference: Sequence[str], heard: Sequence[str]) -> int:
    """Word edits between two sequences (Levenshtein 1966)."""
    row = list(range(len(heard) + 1))
    for index, word in enumerate(reference, 1):
        previous, row[0] = row[0], index
        for other, candidate in enumerate(heard, 1):
            previous, row[other] = row[other], min(row[other] + 1, row[other - 1] + 1, previous + (word != candidate))
    return row[-1]


def errors(reference: str, heard: str) -> int:
    """Word errors of one transcript, its numerals read in the way that fits the reference better."""
    words = fold(reference)
    return min(distance(words, fold(heard)), distance(words, fold(heard, spelled=True)))


def word_error_rate(references: Sequence[str], transcripts: Sequence[str]) -> float:
    """Errors of all transcripts over the words of all references."""
    total = sum(len(fold(reference)) for reference in references)
    return sum(errors(*pair) for pair in zip(references, transcripts, strict=True)) / total
